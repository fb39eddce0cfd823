"""Measure a model's throughput on random prompts, all sent at once. The last line printed is JSON.

python bench.py                              # the bundled model: no download
python bench.py --model Qwen/Qwen3-0.6B --num-requests 128 --prompt-len 100 1024 --output-len 100 1024
"""

import argparse
import json
import random
import sys
import time

from nanoengine import LLM, SamplingParams


def main() -> None:
    """Warm up, measure once, and print both rates."""
    parser = argparse.ArgumentParser(description="Measure a model's throughput.")
    parser.add_argument("--model", default="demo", help="a hub id, a directory or a GGUF file")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, nargs=2, default=[32, 128], metavar=("MIN", "MAX"))
    parser.add_argument("--output-len", type=int, nargs=2, default=[32, 128], metavar=("MIN", "MAX"))
    parser.add_argument("--receipt", action="store_true", help="show where the seconds of one more run went")
    args = parser.parse_args()
    llm = LLM(args.model)
    vocab = range(llm.llm_engine.checkpoint.vocab_size)
    rng = random.Random(0)  # the same requests in every run

    def serve(num_requests: int) -> dict[str, int]:
        prompts = [rng.choices(vocab, k=rng.randint(*args.prompt_len)) for _ in range(num_requests)]
        lengths = [rng.randint(*args.output_len) for _ in range(num_requests)]
        # ignore_eos: every answer has the length that was drawn for it.
        params = [SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        return {"prompt_tokens": sum(map(len, prompts)), "output_tokens": num_output_tokens}

    serve(min(8, args.num_requests))  # warm-up, with prompts of its own: no later prompt is in the cache
    start = time.perf_counter()
    result: dict[str, float] = {"num_requests": args.num_requests, **serve(args.num_requests)}
    result["seconds"] = seconds = time.perf_counter() - start
    for kind in "output", "prompt":
        result[f"{kind}_tokens_per_s"] = result[f"{kind}_tokens"] / seconds
        print(f"{result[f'{kind}_tokens']} {kind} tokens, {result[f'{kind}_tokens_per_s']:.0f} a second")
    if args.receipt:
        from nanoengine.extensions.receipt import show

        llm.receipt()  # records from now on
        serve(args.num_requests)
        print(show(llm.receipt()))
    print(json.dumps({"model": args.model, **result}))


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:  # the model is missing, or the lengths cannot be served
        sys.exit(f"bench.py: {error}")
