"""Measure the cost of structured outputs: the same requests with and without a JSON schema each, in turns.

python -m benchmarks.structured                       # Qwen3-0.6B's shape, and 151,936 made-up words
python -m benchmarks.structured --model Qwen/Qwen3-0.6B --batch 1,16,64

All answers have the same number of tokens, because the schemas require more text than max_tokens allows. The
last line printed is one JSON object.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from nanoengine import LLM, SamplingParams, StructuredOutputsParams
from nanoengine.apps.workloads import SHAPES
from nanoengine.sampling import SamplingRow

PROMPT, ANSWER = 16, 48  # tokens


def made_up_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of all bytes, an end token, and made-up words with and without a leading space."""
    rng, words = random.Random(0), dict.fromkeys(sorted(ByteLevel.alphabet()))
    while len(words) < vocab_size - 1:
        letters = "".join(
            rng.choice("etaoinshrdlucmfwypvbgk0123456789_.,:{}\"'") for _ in range(rng.randrange(1, 9))
        )
        words[rng.choice(("", "Ġ")) + letters] = None
    backend = Tokenizer(BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], ignore_merges=True))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteDecoder()
    backend.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")  # type: ignore[no-untyped-call]


def schema_of(i: int) -> dict[str, Any]:
    """Return a different schema for each request, with more text than an answer has room for."""
    properties = {
        f"name_{i}": {"type": "string", "maxLength": 20},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "note": {"type": "string", "minLength": 1000},
    }
    return {"type": "object", "properties": properties, "required": list(properties)}


def rate(llm: LLM, batch: int, with_form: bool) -> float:
    """Serve `batch` requests at once, and return the output tokens per second."""
    rng = random.Random(batch)
    prompts = [[rng.randrange(300, 4000) for _ in range(PROMPT)] for _ in range(batch)]
    params = [
        SamplingParams(
            temperature=1.0,
            seed=i,
            max_tokens=ANSWER,
            ignore_eos=not with_form,
            structured_outputs=StructuredOutputsParams(json=schema_of(i)) if with_form else None,
        )
        for i in range(batch)
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(out.outputs[0].token_ids) for out in outputs) / (time.perf_counter() - start)


def mask_microseconds(llm: LLM) -> float:
    """Return the median microseconds to apply one constraint's mask, over the positions of an answer."""
    form, times = StructuredOutputsParams(json=schema_of(0)), []
    params = SamplingParams(max_tokens=ANSWER, structured_outputs=form)
    (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    (make,) = llm.llm_engine.check([1, 2, 3], params).processors
    constraint, token_ids = make(), [1, 2, 3, *output.outputs[0].token_ids]
    logits = torch.zeros(1, llm.llm_engine.checkpoint.vocab_size)
    for position in range(3, len(token_ids)):
        row = SamplingRow(params, 0, position, token_ids, 3)
        start = time.perf_counter()
        constraint.apply(logits, [(0, constraint, row)])
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def main() -> None:
    """Measure each batch size, and print a row per batch size and a JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", default="16,64", help="requests served at once")
    parser.add_argument("--model", help="a directory or a hub id; default: made-up words and random weights")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        if args.model is None:
            tokenizer = made_up_tokenizer(SHAPES[args.shape]["vocab_size"])
            tokenizer.save_pretrained(scratch)
            config = {**SHAPES[args.shape], "eos_token_id": tokenizer.eos_token_id}
            Path(scratch, "config.json").write_text(json.dumps(config))
        settings: dict[str, Any] = {"max_model_len": 512, "kv_cache_bytes": 2 << 30, "dtype": args.dtype}
        settings |= {"enable_prefix_caching": False, "load_format": "auto" if args.model else "dummy"}
        with LLM(args.model or scratch, **settings) as llm:
            mask = mask_microseconds(llm)
            print(f"a mask, applied: {mask:.0f} us\nbatch   without     with  ratio  (output tokens/s)")
            for batch in map(int, args.batch.split(",")):
                for with_form in (False, True):  # a warm-up, which also compiles the grammars
                    rate(llm, batch, with_form)
                pairs = [(rate(llm, batch, False), rate(llm, batch, True)) for _ in range(args.repeats)]
                free, formed = (statistics.median(rates) for rates in zip(*pairs, strict=True))
                # Ratios of consecutive runs, so that slow changes of the machine's speed cancel out.
                ratios = [one / other for other, one in pairs]
                print(f"{batch:5} {free:9.1f} {formed:8.1f} {statistics.median(ratios):6.3f}")
                results.append({"batch": batch, "output_tokens_per_s": pairs, "ratios": ratios})
    print(json.dumps({"mask_us": mask, "model": args.model or args.shape, "results": results}))


if __name__ == "__main__":
    main()
