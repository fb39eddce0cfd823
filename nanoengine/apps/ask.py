"""Ask questions or chat in the terminal: `nanoengine run` and `nanoengine chat`.

nanoengine run                                                          # the bundled model: no download
nanoengine run --model Qwen/Qwen3-0.6B --prompt "introduce yourself"
nanoengine run --trace run.html                                         # a page that shows the run
nanoengine chat Qwen/Qwen3-0.6B
"""

import argparse
import io
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nanoengine import LLM, RequestOutput, SamplingParams
from nanoengine.optional import MissingFileError, load

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


def run(arguments: list[str] | None = None) -> None:
    """Run the command `nanoengine run`: answer the questions, and save a trace if requested."""
    parser = argparse.ArgumentParser(
        "nanoengine run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="hub id or directory; default: the bundled model")
    parser.add_argument("--prompt", action="append", help="a question; may be given several times")
    parser.add_argument("--trace", help="show the run: a file that ends in .html, .json (Perfetto) or .jsonl")
    args = parse_sampling(parser, arguments)
    with in_a_terminal(parser):
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
        questions, generate, settings = args.prompt or QUESTIONS, LLM.generate, dict[str, Any]()
        if args.trace:
            events: list[Any] = []
            viewer = load("contrib.viewer", "--trace")
            viewer.save(events, args.trace)  # now, in case the file cannot be written
            settings["trace"] = events.append
            if args.model == "demo" and not args.prompt:
                settings |= viewer.SETTINGS
                questions, generate = viewer.QUESTIONS, viewer.generate_in_steps
        with LLM(args.model, **settings) as llm:
            ask(llm, questions, params, generate)
        if args.trace:
            viewer.save(events, args.trace)
            print(f"\n{args.trace} shows {len(events) - 1} steps")


def chat(arguments: list[str] | None = None) -> None:
    """Run the command `nanoengine chat`: hold a conversation."""
    parser = argparse.ArgumentParser(
        "nanoengine chat",
        description="Hold a conversation. Ctrl-C stops an answer; an empty line ends the program.",
    )
    help_text = "hub id or directory; default: the bundled model"
    parser.add_argument("model", nargs="?", default="demo", help=help_text)
    args = parse_sampling(parser, arguments)
    with in_a_terminal(parser):
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
        with LLM(args.model) as llm:
            converse(llm, params)


def parse_sampling(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Add the flags for SamplingParams that both commands have, and parse the arguments."""
    parser.add_argument("--temperature", type=float, default=0.0, help="default %(default)s: greedy")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer; default %(default)s")
    return parser.parse_args(arguments)


@contextmanager
def in_a_terminal(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Exit as a command should: with a one-line error, on Ctrl-C, or when the output's reader stops."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as `head` may stop reading early
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # the engine then refuses bytes that are not text
    try:
        yield
    except (MissingFileError, ValueError, OSError) as error:  # a bad option, model or file
        sys.exit(f"{parser.prog}: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit(130)


def ask(
    llm: LLM,
    questions: list[str],
    params: SamplingParams,
    generate: Callable[..., list[RequestOutput]],
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
        print(f"\nQ ({num_tokens} tokens): {question}\nA: {output.outputs[0].text}")
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"\n{num_tokens} tokens in {elapsed:.2f} s: {num_tokens / elapsed:.0f} tokens/s")


def converse(llm: LLM, params: SamplingParams) -> None:
    """Hold a conversation in the terminal, and print the answers as they stream."""
    messages: list[dict[str, str]] = []
    while True:
        try:
            question = input("\n> ")
        except (EOFError, KeyboardInterrupt):
            question = ""
        if not question:
            print("bye")
            return
        messages.append({"role": "user", "content": question})
        answer = ""
        try:
            for output in llm.stream(llm.render_chat(messages), params):
                for completion in output.outputs:
                    answer += completion.text
                    print(completion.text, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except ValueError as error:  # the conversation is longer than the model's limit, or is not text
            print(f"{error}; starting over", end="")
            messages.clear()
            continue
        print()
        messages.append({"role": "assistant", "content": answer})
