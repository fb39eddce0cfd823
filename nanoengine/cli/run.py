"""Ask a model a few questions: `nanoengine run`.

nanoengine run                                                          # the bundled model: no download
nanoengine run Qwen/Qwen3-0.6B --prompt "introduce yourself"
nanoengine run --trace run.html                                         # a page that shows the run
nanoengine run Qwen/Qwen3-0.6B --trace run.html --num-kv-blocks 20      # a small cache: preemptions
"""

import time
from collections.abc import Callable
from typing import Any

from nanoengine import LLM, RequestOutput, SamplingParams
from nanoengine.cli.terminal import cut_mark, in_a_terminal, make_parser
from nanoengine.config import EngineConfig
from nanoengine.extensions.receipt import show
from nanoengine.flags import settings_of
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


def main(arguments: list[str] | None = None) -> None:
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
            is_page = bool(args.trace) and args.trace.endswith(".html")
            if is_page:
                llm.receipt()  # records from now on
            ask(llm, questions, params, generate)
            receipt = show(llm.receipt()) if is_page else ""
        if args.trace:
            save(events, args.trace, receipt=receipt)
            print(f"\n{args.trace} shows {len(events) - 1} steps")


def ask(llm: LLM, questions: list[str], params: SamplingParams, generate: Generate) -> None:
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
