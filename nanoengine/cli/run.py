"""Ask questions or chat in the terminal: `nanoengine run` and `nanoengine chat`.

nanoengine run                                                          # the bundled model: no download
nanoengine run Qwen/Qwen3-0.6B --prompt "introduce yourself"
nanoengine run --trace run.html                                         # a page that shows the run
nanoengine run Qwen/Qwen3-0.6B --trace run.html --num-kv-blocks 20      # a small cache: preemptions
nanoengine chat Qwen/Qwen3-0.6B
"""

import argparse
import io
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from nanoengine import LLM, CompletionOutput, RequestOutput, SamplingParams
from nanoengine.chat.tool_formats import AnswerParser, choose_formats
from nanoengine.config import EngineConfig
from nanoengine.flags import FlexibleArgumentParser, add_flags, settings_of
from nanoengine.viewer.trace_page import save

SENTENCES = [
    "The brave sailor found the golden lantern near a castle.",
    "The hungry fox stole the red apple behind a market.",
    "The old queen buried the broken mirror under a tower.",
]
NOISE = [
    f"The {adjective} {noun} followed the {color} wagon inside a village."
    for adjective in ("tall", "quiet", "young", "clever")
    for noun, color in (("baker", "blue"), ("raven", "green"), ("soldier", "silver"), ("child", "wooden"))
]


def repeat(sentences: list[str], noise: list[str]) -> str:
    """Return a question whose answer is a passage."""
    passage, other = " ".join(sentences), " ".join(noise)
    return f"Remember this passage: {passage} Here is some noise: {other} Repeat the passage."


QUESTIONS = [
    "Who are you?",
    "What is 27 + 58?",
    "Count from 8 to 21.",
    "Spell the word attention backwards.",
    "List the primes below 100.",
    repeat(SENTENCES, NOISE),
]


# The run that `run --trace` shows by default. The cache is so small that sequences are preempted.
# Questions that repeat, or begin alike, hit the prefix cache. The lessons name steps of this run by number;
# on a GPU, steps overlap and the numbers differ.
TRACED_SETTINGS = {"device": "cpu", "num_kv_blocks": 44, "block_size": 4, "max_num_batched_tokens": 32}
TRACED_QUESTIONS = [
    "What is 27 + 58?",
    "Count from 8 to 16.",
    "What is 27 + 58?",
    repeat(SENTENCES[:2], NOISE[:1]),
    repeat(SENTENCES[:2], NOISE[7:8]),
    "Spell the word paging backwards.",
    "Count from 8 to 16.",
    "Spell the word paging backwards.",
]
STEPS = 1, 5, 9, 15, 18, 22, 24, 34  # the step before which each question arrives


def generate_in_steps(llm: LLM, prompts: list[Any], params: SamplingParams) -> list[RequestOutput]:
    """Step the engine by hand, and add each question before its step. Return the outputs in order."""
    outputs: dict[str, RequestOutput] = {}
    step = 0
    while step < max(STEPS) or llm.has_unfinished_requests():
        step += 1
        for i, (prompt, arrival) in enumerate(zip(prompts, STEPS, strict=True)):
            if arrival == step:
                llm.add_request(str(i), prompt, params)
        outputs |= {output.request_id: output for output in llm.step()}
    return [outputs[str(i)] for i in range(len(prompts))]


Generate = Callable[[LLM, list[Any], SamplingParams], list[RequestOutput]]


def run(arguments: list[str] | None = None) -> None:
    """Run the command `nanoengine run`: answer the questions, and save a trace if requested."""
    parser = make_parser("nanoengine run", str(__doc__), max_tokens=256)
    parser.add_argument("--prompt", action="append", help="a question; may be given several times")
    parser.add_argument("--trace", help="show the run: a file that ends in .html, .json (Perfetto) or .jsonl")
    args = parser.parse_args(arguments)
    with in_a_terminal(parser):
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
        questions, settings = args.prompt or QUESTIONS, settings_of(parser, args, EngineConfig)
        generate: Generate = LLM.generate
        if args.trace:
            events: list[Any] = []
            save(events, args.trace)  # now, in case the file cannot be written
            settings["trace"] = events.append
            if settings["model"] == "demo" and not args.prompt:
                settings, questions = TRACED_SETTINGS | settings, TRACED_QUESTIONS
                generate = generate_in_steps
        with LLM(**{"max_num_seqs": len(questions)} | settings) as llm:  # the cache is sized for them
            ask(llm, questions, params, generate)
        if args.trace:
            save(events, args.trace)
            print(f"\n{args.trace} shows {len(events) - 1} steps")


def chat(arguments: list[str] | None = None) -> None:
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
        with LLM(
            **{"max_num_seqs": 1} | settings_of(parser, args, EngineConfig)
        ) as llm:  # the cache is sized for one
            if not getattr(llm.get_tokenizer(), "chat_template", None):
                model = llm.llm_engine.config.model
                raise ValueError(
                    f"{model} has no chat template, so it cannot hold a conversation; "
                    f"`nanoengine run {model} --prompt TEXT` continues a text"
                )
            converse(llm, params, args.system, args.verbose)


def make_parser(command: str, about: str, max_tokens: int) -> FlexibleArgumentParser:
    """Return a parser for the flags that both commands have: sampling, and one per EngineConfig field."""
    parser = FlexibleArgumentParser(
        command,
        "%(prog)s [MODEL] [--FLAG VALUE ...]",
        about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",  # `run` has a --trace of its own
        allow_abbrev=False,
    )
    what = "directory, hub id or GGUF file; default: the bundled model"
    parser.add_argument("model_tag", metavar="MODEL", nargs="?", help=what)
    parser.add_argument("--temperature", type=float, default=0.0, help="default %(default)s: greedy")
    parser.add_argument(
        "--max-tokens", type=int, default=max_tokens, help="limit per answer; default %(default)s"
    )
    add_flags(
        parser.add_argument_group("engine", "settings of the engine: fields of EngineConfig"), EngineConfig
    )
    return parser


@contextmanager
def in_a_terminal(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Exit as a command should: with a one-line error, on Ctrl-C, or when the output's reader stops."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as `head` may stop reading early
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # the engine then refuses bytes that are not text
    try:
        yield
    except (TypeError, ValueError, OSError) as error:  # a bad option, model or file
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def ask(
    llm: LLM,
    questions: list[str],
    params: SamplingParams,
    generate: Generate,
) -> None:
    """Answer questions and print the answers. `generate` is `LLM.generate`, or computes the same."""
    start = time.perf_counter()
    prompts: list[Any] = list(questions)
    if getattr(llm.get_tokenizer(), "chat_template", None):
        prompts = llm.render_chat([[{"role": "user", "content": question}] for question in questions])
    outputs = generate(llm, prompts, params)
    elapsed = time.perf_counter() - start

    for question, output in zip(questions, outputs, strict=True):
        num_tokens = len(output.prompt_token_ids)
        if len(question) > 300:
            question = f"{question[:240]} [...] {question[-30:]}"
        answer = output.outputs[0]
        end = cut_mark(answer, len(answer.token_ids))
        print(f"\nQ ({num_tokens} tokens): {question}\nA: {answer.text}{end}")
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"\n{num_tokens} tokens in {elapsed:.2f} s: {num_tokens / elapsed:.0f} tokens/s")


def cut_mark(completion: CompletionOutput, num_tokens: int) -> str:
    """Return what to print after an answer of `num_tokens` tokens: a remark if a limit cut it off."""
    return f" [cut at {num_tokens} tokens]" if completion.finish_reason == "length" else ""


def converse(llm: LLM, params: SamplingParams, system: str | None = None, verbose: bool = False) -> None:
    """Hold a conversation in the terminal, and print the answers as they stream."""
    beginning = [{"role": "system", "content": system}] if system else []
    messages = beginning.copy()
    parse, params = thought_parser(llm, params)
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
            message = parse(prompts[0]["prompt"])
            for output in llm.stream(prompts, params):
                for completion in output.outputs:
                    num_tokens += len(completion.token_ids)
                    piece = message(completion)
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


# A function of a prompt, which returns a function that splits pieces of the answer into content and reasoning
Parse = Callable[[str], Callable[[CompletionOutput], dict[str, str]]]


def thought_parser(llm: LLM, params: SamplingParams) -> tuple[Parse, SamplingParams]:
    """Return a function that separates thoughts from answers, and parameters that keep the tags it needs."""
    formats = choose_formats(llm.get_tokenizer())._replace(tools=None)
    if formats.reasoning or formats.template:
        if formats.keeps_special_tokens:
            params = replace(params, skip_special_tokens=False)

        def parse(prompt: str) -> Callable[[CompletionOutput], dict[str, str]]:
            return partial(AnswerParser(formats, prompt, []).message, is_stream=True)

        return parse, params
    return lambda prompt: lambda completion: {"content": completion.text}, params
