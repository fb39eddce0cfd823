"""Measure the gain from speculative decoding: the same requests with and without it, in turns.

python -m benchmarks.speculate                          # Qwen3-0.6B's shape, and the demo's passages
python -m benchmarks.speculate --text random,coin --batch 16
python -m benchmarks.speculate --text code --model Qwen/Qwen3-0.6B

How many draft tokens are accepted depends on the text:

    same        the answer repeats one token: as many draft tokens are accepted as possible
    passages    the bundled model repeats a passage word for word, from hundreds of tokens earlier
    code        a model with a chat template (--model) renames a parameter and writes the function out again
    coin        the answer has two tokens at random: lookups succeed, and half of the draft tokens fail
    random      nothing repeats: this measures the cost of looking

The last line printed is one JSON object.
"""

import argparse
import functools
import inspect
import json
import os
import random
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import nanoengine
from nanoengine import LLM, SamplingParams
from nanoengine.apps.workloads import SHAPES

DEMO = str(Path(nanoengine.__file__).parent / "demo")
PROMPT, ANSWER = 256, 128  # tokens, for the texts same, coin and random


def ask_for_passage(rng: random.Random) -> str:
    """Return a question of the kind that the bundled model was trained on."""
    from examples.train_demo import ask_passage

    return ask_passage(rng, most=20)[0]


def ask_for_code(rng: random.Random) -> str:
    """Return a request to rename a parameter in a function of the standard library."""
    functions: list[Any] = [textwrap.wrap, textwrap.dedent, textwrap.indent, statistics.median]
    function = rng.choice(functions)
    name = rng.choice(list(inspect.signature(function).parameters))
    code = inspect.getsource(function)
    return f"Rename {name} to {name}_{rng.randrange(100)}. Answer with the whole function.\n\n{code}"


# text -> the question of a chat, or the number of tokens that answers are sampled from (None: all)
TEXTS: dict[str, Callable[[random.Random], str] | int | None] = {
    "same": 1,
    "passages": ask_for_passage,
    "code": ask_for_code,
    "coin": 2,
    "random": None,
}


def serve(llm: LLM, text: str, batch: int, run: str) -> tuple[float, list[list[int]]]:
    """Serve `batch` requests at once, and return the seconds it took and the answers' tokens."""
    rng, kind = random.Random(f"{text} {batch} {run}"), TEXTS[text]
    vocab_size = llm.llm_engine.checkpoint.vocab_size
    chosen = SamplingParams(temperature=0.6, seed=0, max_tokens=ANSWER, detokenize=False, ignore_eos=True)
    if callable(kind):
        chosen = SamplingParams(temperature=0, max_tokens=512)
        ask = functools.partial(llm.chat, [[{"role": "user", "content": kind(rng)}] for _ in range(batch)])
    else:
        chosen.allowed_token_ids = list(range(5, 5 + kind)) if kind else None
        prompts = [[rng.randrange(min(4000, vocab_size)) for _ in range(PROMPT)] for _ in range(batch)]
        ask = functools.partial(llm.generate, prompts)
    start = time.perf_counter()
    outputs = ask(chosen, use_tqdm=False)
    return time.perf_counter() - start, [out.outputs[0].token_ids for out in outputs]


def compare(llms: dict[str, LLM], text: str, batch: int, repeats: int) -> dict[str, Any]:
    """Serve new requests with and without speculative decoding, in turns. The tokens should not differ."""
    rates: dict[str, list[float]] = {"off": [], "on": []}
    for llm in llms.values():
        serve(llm, text, min(batch, 2), "warm-up")
    before, num_different = llms["on"].metrics(), 0
    for run in range(repeats):
        answers = {}
        for name in ("off", "on") if run % 2 else ("on", "off"):
            seconds, answers[name] = serve(llms[name], text, batch, str(run))
            rates[name].append(sum(map(len, answers[name])) / seconds)
        num_different += sum(a != b for a, b in zip(answers["off"], answers["on"], strict=True))
    after = llms["on"].metrics()
    drafts, drafted, accepted = (
        int(after[name] - before[name])
        for name in (f"spec_decode_num_{what}" for what in ("drafts", "draft_tokens", "accepted_tokens"))
    )
    medians = {name: statistics.median(values) for name, values in rates.items()}
    result = {
        "text": text,
        "batch": batch,
        "output_tokens_per_s": rates,
        # The median over pairs of consecutive runs with the same requests, so that slow changes of the
        # machine's speed cancel out.
        "gain": statistics.median(on / off for off, on in zip(rates["off"], rates["on"], strict=True)),
        "drafted": drafted,
        "accepted": accepted,
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        "answers_that_differ": num_different,
    }
    print(
        f"{text:9} {batch:5} {medians['off']:9.1f} {medians['on']:9.1f} {result['gain']:6.2f}x"
        f" {drafted:8} {accepted:8}  {num_different}"
    )
    return result


def main() -> None:
    """Measure each text and batch size, and print a row for each and a JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", default="same,passages,coin,random", help=f"of {', '.join(TEXTS)}")
    parser.add_argument("--batch", default="1,4,16", help="requests served at once")
    parser.add_argument("--tokens", type=int, default=4, help="num_speculative_tokens")
    parser.add_argument("--lookup", type=int, nargs=2, default=(2, 4), help="prompt_lookup_min and _max")
    parser.add_argument("--model", help="a directory or a hub id; default: the bundled one for passages")
    parser.add_argument(
        "--shape", choices=SHAPES, default="qwen3-0.6b", help="with random weights, elsewhere"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    texts = args.text.split(",")
    if unknown := set(texts) - TEXTS.keys():
        parser.error(f"no such text: {', '.join(unknown)}")
    if "code" in texts and not args.model:
        parser.error("--text code needs a --model that can write code")
    torch.set_num_threads(args.threads)
    speculative = {
        "method": "ngram",
        "num_speculative_tokens": args.tokens,
        "prompt_lookup_min": args.lookup[0],
        "prompt_lookup_max": args.lookup[1],
    }
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "config.json").write_text(json.dumps(SHAPES[args.shape]))
        default = {text: DEMO if text == "passages" else scratch for text in texts}
        for model in dict.fromkeys(args.model or default[text] for text in texts):
            settings: dict[str, Any] = {
                "load_format": "dummy" if model == scratch else "auto",
                "dtype": args.dtype,
                "max_model_len": 1024,
                "kv_cache_bytes": 2 << 30,
                "enable_prefix_caching": False,
            }
            try:
                off = LLM(model, **settings)
                on = LLM(model, speculative_config=speculative, **settings)
            except (ValueError, OSError) as error:
                sys.exit(f"{parser.prog}: {' '.join(str(error).split())}")
            print("text      batch       off        on    gain  drafted accepted  differ  (output tokens/s)")
            with off, on:
                for text in texts:
                    if model == (args.model or default[text]):
                        for batch in map(int, args.batch.split(",")):
                            results.append(compare({"off": off, "on": on}, text, batch, args.repeats))
    print(
        json.dumps({"speculative_config": speculative, "model": args.model or args.shape, "results": results})
    )


if __name__ == "__main__":
    main()
