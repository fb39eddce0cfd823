"""Measure one feature of nanoengine. No download; the last line printed is one JSON object.

python -m benchmarks.features speculate     # draft tokens, with and without, in turns
python -m benchmarks.features quality       # what quantized weights and KV caches change in log-probabilities
python -m benchmarks.features int8_cache    # decodes at a long context with a KV cache in int8, and without

The model is a published shape with random weights, unless --model names a checkpoint; for passages and for
quality it is the bundled one.
"""

import argparse
import functools
import json
import os
import pydoc_data.topics
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.host import start_decodes
from benchmarks.models import SHAPES, write_shape
from examples import train_demo
from nanoengine import LLM, SamplingParams

GiB = 1 << 30


def random_prompts(rng: random.Random, count: int, length: int, vocab_size: int = 4000) -> list[list[int]]:
    """Return prompts of random token ids."""
    return [[rng.randrange(min(4000, vocab_size)) for _ in range(length)] for _ in range(count)]


# ---- Speculative decoding ------------------------------------------------------------------------

# How many tokens the answers are sampled from: the fewer, the more draft tokens are accepted. None: all. In
# passages, the bundled model repeats a text word for word. English continues Python's documentation.
TEXTS = {"same": 1, "coin": 2, "random": None, "passages": None, "english": None}
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}


def serve_text(llm: LLM, text: str, batch: int, run: str) -> tuple[float, list[list[int]]]:
    """Serve `batch` requests at once, and return the output tokens per second and the answers' tokens."""
    rng = random.Random(f"{text} {batch} {run}")
    params = SamplingParams(temperature=0.6, seed=0, max_tokens=128, detokenize=False, ignore_eos=True)
    ask: Callable[..., Any]
    if text == "passages":
        params = SamplingParams(temperature=0, max_tokens=512)
        question = {"role": "user", "content": train_demo.ask_passage(rng, 20)[0]}
        ask = functools.partial(llm.chat, [[question]] * batch)
    else:
        count = TEXTS[text]
        params.allowed_token_ids = list(range(5, 5 + count)) if count else None
        prompts = random_prompts(rng, batch, 256, llm.llm_engine.checkpoint.vocab_size)
        if text == "english":
            prompts = [ids for ids, _ in rng.sample(english(llm.get_tokenizer(), 20_000)[:-1], batch)]
        ask = functools.partial(llm.generate, prompts)
    start = time.perf_counter()
    answers = [output.outputs[0].token_ids for output in ask(params, use_tqdm=False)]
    return sum(map(len, answers)) / (time.perf_counter() - start), answers


def compare_drafts(off: LLM, on: LLM, text: str, batch: int, repeats: int) -> dict[str, Any]:
    """Serve the same new requests with and without draft tokens, in turns. The answers should not differ."""
    for llm in (off, on):
        serve_text(llm, text, min(batch, 2), "warm-up")
    before, rates, num_different = on.metrics(), [], 0
    for run in map(str, range(repeats)):
        (fast, ours), (slow, expected) = (serve_text(llm, text, batch, run) for llm in (on, off))
        rates.append((fast, slow))
        num_different += sum(a != b for a, b in zip(ours, expected, strict=True))
    names = [f"spec_decode_num_{what}_tokens" for what in ("draft", "accepted")]
    drafted, accepted = (int(on.metrics()[name] - before[name]) for name in names)
    # Ratios of consecutive runs, so that slow changes of the machine's speed cancel out.
    gain = statistics.median(fast / slow for fast, slow in rates)
    fast, slow = map(statistics.median, zip(*rates, strict=True))
    speeds, counts = f"{fast:9.1f} {slow:9.1f} {gain:6.2f}x", f"{drafted:8} {accepted:8}  {num_different}"
    print(f"{text:9} {batch:5} {speeds} {counts}")
    result = {"text": text, "batch": batch, "output_tokens_per_s": rates, "gain": gain}
    return result | {"drafted": drafted, "accepted": accepted, "answers_that_differ": num_different}


def speculate(model: str, settings: dict[str, Any], args: argparse.Namespace) -> Any:
    """Measure each text and batch size."""
    config = args.config | {"num_speculative_tokens": args.tokens}
    settings |= {"max_model_len": 1024, "kv_cache_bytes": 2 * GiB, "enable_prefix_caching": False}
    print("text      batch      with   without   ratio  drafted accepted  differ  (output tokens/s)")
    results = []
    for text in args.text:
        if text == "passages" and args.model is None:
            model, settings = "demo", settings | {"load_format": "auto"}
        with LLM(model, **settings) as off, LLM(model, speculative_config=config, **settings) as on:
            results += [compare_drafts(off, on, text, batch, args.repeats) for batch in args.batch]
    return results


# ---- The quality of quantized weights ------------------------------------------------------------

# Computed in float32, so that only rounding differs. "+a8": activations in 8 bits. "kv8": the KV cache.
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "kv8": {"dtype": "float32", "kv_cache_dtype": "int8"},
}
PRECISIONS |= {name: {"dtype": "float32", "quantization": name} for name in ("int8", "int4")}
PRECISIONS |= {f"{name}+a8": PRECISIONS[name] | {"activations": "int8"} for name in ("int8", "int4")}
OF_GGUF = {x: PRECISIONS[x] for x in ("float32", "kv8")}
OF_GGUF |= {"16": {"activations": "float"}, "16+a8": {"activations": "int8"}}
Text = tuple[list[int], int]  # token ids, and how many of the first ones are not scored


def questions(count: int) -> list[tuple[str, str]]:
    """Return questions for the bundled model that it was not trained on, with their answers."""
    rng = random.Random(12345)
    asks = [train_demo.ask_sum, train_demo.ask_count, train_demo.ask_backwards]
    asks.append(lambda rng: train_demo.ask_passage(rng, 20))
    return [asks[i % len(asks)](rng) for i in range(count)]


def answered(tokenizer: Any, asked: list[tuple[str, str]]) -> Iterator[Text]:
    """Yield conversations of which only the answers are scored."""
    for question, answer in asked:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt).input_ids
        yield ids + tokenizer(answer).input_ids, len(ids)


def english(tokenizer: Any, num_tokens: int) -> list[Text]:
    """Return the beginning of Python's documentation, in pieces of 256 tokens."""
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text[: 10 * num_tokens], add_special_tokens=False).input_ids[:num_tokens]
    return [(ids[i : i + 256], 1) for i in range(0, len(ids) - 1, 256)]


def log_probabilities(llm: LLM, texts: list[Text]) -> list[float]:
    """Return the log-probability of each scored token."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    outputs: Any = llm.generate([{"prompt_token_ids": ids} for ids, _ in texts], params, use_tqdm=False)
    pairs = zip(outputs, texts, strict=True)
    return [
        out.prompt_logprobs[i][ids[i]].logprob for out, (ids, first) in pairs for i in range(first, len(ids))
    ]


def num_right(llm: LLM, asked: list[tuple[str, str]]) -> int:
    """Return how many questions get exactly the right answer."""
    chats: Any = [[{"role": "user", "content": question}] for question, _ in asked]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)
    return sum(out.outputs[0].text == answer for out, (_, answer) in zip(outputs, asked, strict=True))


def weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of the weights, counting shared ones once."""
    tensors = [x for x in (*model.parameters(), *model.buffers()) if not x.is_mkldnn]
    return sum({x.data_ptr(): x.nbytes for x in tensors}.values())


def quality(model: str, settings: dict[str, Any], args: argparse.Namespace) -> Any:
    """Measure the log-probabilities of the same texts, and the bytes, in each precision."""
    asked = [] if args.model else questions(args.questions)
    exact: dict[str, list[float]] = {}
    results = []
    print("text     precision  log-probability  changes by  right     MB", flush=True)
    for precision, own in (OF_GGUF if model.endswith(".gguf") else PRECISIONS).items():
        with LLM(args.model or "demo", max_model_len=1024, kv_cache_bytes=GiB // 4, **own) as llm:
            texts = {"english": english(llm.get_tokenizer(), args.tokens)}
            if asked:
                texts["answers"] = list(answered(llm.get_tokenizer(), asked))
            for text, pieces in texts.items():
                found = log_probabilities(llm, pieces)
                changes = [abs(x - y) for x, y in zip(found, exact.setdefault(text, found), strict=True)]
                num_bytes = weight_bytes(llm.llm_engine.runner.model)
                row: dict[str, Any] = {"text": text, "precision": precision, "weight_bytes": num_bytes}
                row |= {"logprob": statistics.fmean(found), "change": statistics.fmean(changes)}
                row["right"] = num_right(llm, asked) if text == "answers" else "-"
                figures = f"{row['logprob']:15.4g}  {row['change']:10.2g}  {row['right']:>5}"
                print(f"{text:8} {precision:9}  {figures}  {row['weight_bytes'] / 1e6:5.2f}", flush=True)
                results.append(row)
    return results


# ---- The KV cache in int8 ------------------------------------------------------------------------

NUM_STEPS, NUM_ANSWER_TOKENS = 6, 400  # of one measurement; room for the tokens that a sequence samples


def decode(llm: LLM, num_seqs: int) -> float:
    """Return the tokens per second of a few steps."""
    llm.step()  # a warm-up: the other engine ran before
    begin = time.perf_counter()
    for _ in range(NUM_STEPS):
        llm.step()
    return num_seqs * NUM_STEPS / (time.perf_counter() - begin)


def int8_cache(model: str, settings: dict[str, Any], args: argparse.Namespace) -> Any:
    """Decode in turns with a KV cache in the model's dtype and in int8, with weights in int4."""
    length, num_seqs = args.tokens + NUM_ANSWER_TOKENS, args.batch
    settings |= {"quantization": "int4", "enable_prefix_caching": False, "max_model_len": length}
    settings |= {"max_num_seqs": num_seqs, "block_size": 32, "num_kv_blocks": num_seqs * -(-length // 32) + 1}
    with LLM(model, **settings) as plain, LLM(model, kv_cache_dtype="int8", **settings) as ours:
        for llm in (plain, ours):
            sampling: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "detokenize": False}
            start_decodes(llm.llm_engine, num_seqs, args.tokens, **sampling)
        pairs = [(decode(ours, num_seqs), decode(plain, num_seqs)) for _ in range(args.repeats)]
    fast, slow = map(statistics.median, zip(*pairs, strict=True))
    ratio = statistics.median(fast / slow for fast, slow in pairs)
    print(f"{fast:.1f} tokens/s with int8, {slow:.1f} without, ratio {ratio:.2f}")
    return pairs


def main(arguments: list[str] | None = None) -> None:
    """Measure a feature, and print its rows and a JSON line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    features = parser.add_subparsers(dest="feature", required=True)

    def add(run: Callable[..., Any], repeats: int) -> argparse.ArgumentParser:
        feature = features.add_parser(run.__name__, description=run.__doc__, formatter_class=form)
        feature.set_defaults(run=run)
        feature.add_argument("--model", help="a directory or a hub id")
        feature.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="with random weights")
        feature.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
        feature.add_argument("--repeats", type=int, default=repeats)
        feature.add_argument("--threads", type=int, help="default: one per CPU, or what a CPU quota allows")
        return feature

    feature = add(speculate, repeats=5)
    feature.add_argument("--text", nargs="+", choices=TEXTS, default=[*TEXTS][:4])
    feature.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16], help="requests served at once")
    feature.add_argument("--tokens", type=int, default=4, help="num_speculative_tokens")
    feature.add_argument("--config", type=json.loads, default=NGRAM, help="speculative_config, as JSON")
    feature = add(int8_cache, repeats=5)
    feature.add_argument("--batch", type=int, default=16, help="sequences")
    feature.add_argument("--tokens", type=int, default=2048, help="of a prompt")
    feature = add(quality, repeats=1)
    feature.add_argument("--tokens", type=int, default=8_000, help="of the text")
    feature.add_argument("--questions", type=int, default=400, help="for the bundled model")
    args = parser.parse_args(arguments)
    if args.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)  # a CPU quota does not lower it
    torch.set_num_threads(args.threads or len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as scratch:
        write_shape(args.shape, scratch)
        settings = {"dtype": args.dtype, "load_format": "auto" if args.model else "dummy"}
        try:
            results = args.run(args.model or scratch, settings, args)
        except (ValueError, OSError) as error:  # the model cannot be loaded, or a directory is missing
            sys.exit(f"{parser.prog}: {' '.join(str(error).split())}")
    print(json.dumps({name: x for name, x in vars(args).items() if name != "run"} | {"results": results}))


if __name__ == "__main__":
    main()
