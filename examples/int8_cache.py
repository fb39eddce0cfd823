"""Compare tokens per second with a KV cache in the model's dtype and in int8, at a long context.

python -m examples.int8_cache [SEQUENCES TOKENS [PAIRS]]    # Qwen3-0.6B's shape, random weights in int4

Two engines decode in turns in one process, so that slow changes of the machine's speed cancel out.
"""

import random
import statistics
import sys
import tempfile
import time
from typing import Literal

from benchmarks.models import write_shape
from nanoengine import LLM, SamplingParams

NUM_STEPS, NUM_ANSWER_TOKENS = 6, 400  # of one measurement; the most that a sequence samples


def start(model: str, num_seqs: int, num_tokens: int, kv_cache_dtype: Literal["auto", "int8"]) -> LLM:
    """Return an engine whose sequences have computed their prompts."""
    block_size, length = 32, num_tokens + NUM_ANSWER_TOKENS
    llm = LLM(
        model,
        load_format="dummy",
        quantization="int4",
        kv_cache_dtype=kv_cache_dtype,
        enable_prefix_caching=False,
        max_model_len=length,
        max_num_seqs=num_seqs,
        block_size=block_size,
        num_kv_blocks=num_seqs * -(-length // block_size) + 1,
    )
    rng, engine = random.Random(0), llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=NUM_ANSWER_TOKENS, ignore_eos=True, detokenize=False)
    for i in range(num_seqs):
        prompt = [rng.randrange(4000) for _ in range(num_tokens)]
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    first_tokens = set[str]()
    while len(first_tokens) < num_seqs:
        first_tokens |= {output.request_id for output in engine.step()}
    return llm


def decode(llm: LLM, num_seqs: int) -> float:
    """Return the tokens per second of a few steps."""
    llm.llm_engine.step()  # a warm-up: the other engine ran before
    begin = time.perf_counter()
    for _ in range(NUM_STEPS):
        llm.llm_engine.step()
    return num_seqs * NUM_STEPS / (time.perf_counter() - begin)


def main(num_seqs: int = 16, num_tokens: int = 2048, num_pairs: int = 5) -> None:
    with tempfile.TemporaryDirectory() as model:
        write_shape("qwen3-0.6b", model, dtype="bfloat16")
        with (
            start(model, num_seqs, num_tokens, "auto") as plain,
            start(model, num_seqs, num_tokens, "int8") as ours,
        ):
            pairs = [(decode(ours, num_seqs), decode(plain, num_seqs)) for _ in range(num_pairs)]
    ratios = sorted(fast / slow for fast, slow in pairs)
    fast, slow = map(statistics.median, zip(*pairs, strict=True))
    print(f"{num_seqs} sequences of {num_tokens} tokens: {fast:.1f} tokens/s with int8, {slow:.1f} without")
    print(f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
