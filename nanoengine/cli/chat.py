"""Hold a conversation in the terminal: `nanoengine chat`.

nanoengine chat Qwen/Qwen3-0.6B
"""

import sys
import time
from contextlib import suppress
from dataclasses import replace

from nanoengine import LLM, SamplingParams
from nanoengine.chat.answer_parser import AnswerParser, choose_formats
from nanoengine.cli.terminal import cut_mark, in_a_terminal, make_parser
from nanoengine.config import EngineConfig
from nanoengine.flags import settings_of


def main(arguments: list[str] | None = None) -> None:
    """Run the command `nanoengine chat`: hold a conversation."""
    about = "Hold a conversation. Ctrl-C stops an answer. An empty line, Ctrl-D or Ctrl-C ends the program."
    parser = make_parser("nanoengine chat", about, max_tokens=2048)
    parser.add_argument("--system", metavar="TEXT", help="the system message, which begins the conversation")
    parser.add_argument("--verbose", action="store_true", help="print the tokens/s after each answer")
    args = parser.parse_args(arguments)
    with suppress(ImportError):  # Windows has no readline
        import readline  # from now on, `input` has a history and editing keys

        readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one message
    with in_a_terminal(parser):
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
        settings = {"max_num_seqs": 1} | settings_of(parser, args, EngineConfig)  # the cache is sized for one
        with LLM(**settings) as llm:
            if not getattr(llm.get_tokenizer(), "chat_template", None):
                model = llm.config.model
                raise ValueError(
                    f"{model} has no chat template, so it cannot hold a conversation; "
                    f"`nanoengine run {model} --prompt TEXT` continues a text"
                )
            converse(llm, params, args.system, args.verbose)


def converse(llm: LLM, params: SamplingParams, system: str | None = None, verbose: bool = False) -> None:
    """Hold a conversation in the terminal, and print the answers as they stream."""
    beginning = [{"role": "system", "content": system}] if system else []
    messages = beginning.copy()
    formats = choose_formats(llm.get_tokenizer())._replace(tools=None)  # thoughts are printed dimmed
    if formats.keeps_special_tokens:
        params = replace(params, skip_special_tokens=False)
    while True:
        print()
        try:
            question = input("> ")
        except EOFError:
            question = ""
        if not question:
            print("bye")
            return
        messages.append({"role": "user", "content": question})
        answer, thoughts, num_tokens, start = "", "", 0, time.perf_counter()
        try:
            prompts = llm.render_chat(messages)
            parser = AnswerParser(formats, prompts[0]["prompt"], [])
            for output in llm.stream(prompts, params):
                for completion in output.outputs:
                    num_tokens += len(completion.token_ids)
                    piece = parser.message(completion, is_stream=True)
                    if thought := piece.get("reasoning", ""):
                        print(dimmed(thought), end="", flush=True)
                    if thoughts and not answer and piece["content"]:
                        print("\n")
                    thoughts, answer = thoughts + thought, answer + piece["content"]
                    print(piece["content"], end=cut_mark(completion, num_tokens), flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except ValueError as error:  # the conversation is longer than the model's limit, or is not text
            print(f"{error}; starting over", end="")
            messages = beginning.copy()
            continue
        print()
        if verbose:
            seconds = time.perf_counter() - start
            print(dimmed(f"{num_tokens} tokens in {seconds:.1f} s: {num_tokens / seconds:.1f} tokens/s"))
        messages.append({"role": "assistant", "content": answer})


def dimmed(text: str) -> str:
    """Return the text as a terminal shows it in a fainter color, or unchanged if stdout is no terminal."""
    return f"\033[2m{text}\033[22m" if sys.stdout.isatty() else text
