"""Measure what quantized weights cost: log-probabilities of the same texts, and bytes, in each precision.

python -m benchmarks.quality                                   # the bundled model
python -m benchmarks.quality --model Qwen/Qwen3-0.6B --text book.txt

The text is English, from Python's own documentation (`pydoc_data.topics`) unless `--text` names a file. For
the bundled model, a second text holds the right answers to 400 questions that it was not trained on. It knows
few English words, so its answers show the effect of rounding on text that a model predicts well, and English
shows the effect on text that it predicts badly. Quantized weights are computed with in float32, so that only
their rounding differs. The last line printed is one JSON object.
"""

import argparse
import json
import platform
import pydoc_data.topics
import random
import statistics
from pathlib import Path
from typing import Any

from examples import train_demo as train
from nanoengine import LLM, SamplingParams
from nanoengine.models.checkpoint import DEMO

PIECE = 256  # number of tokens in each piece of a text
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
}
Text = tuple[list[int], int]  # token ids, and how many of the first ones are not scored


def questions(count: int) -> list[tuple[str, str]]:
    """Return questions for the bundled model, with their answers."""
    rng = random.Random(12345)
    asks: list[train.Task] = [train.ask_sum, train.ask_count, train.ask_backwards]
    asks.append(lambda rng: train.ask_passage(rng, 20))
    return [asks[i % len(asks)](rng) for i in range(count)]


def answered(tokenizer: Any, asked: list[tuple[str, str]]) -> list[Text]:
    """Return conversations of which only the answers are scored."""
    texts = []
    for question, answer in asked:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt).input_ids
        texts.append((ids + tokenizer(answer).input_ids, len(ids)))
    return texts


def english(tokenizer: Any, path: str | None, num_tokens: int) -> list[Text]:
    """Return the beginning of an English text, in pieces."""
    topics = pydoc_data.topics.topics
    text = Path(path).read_text() if path else "\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text[: 10 * num_tokens], add_special_tokens=False).input_ids[:num_tokens]
    return [(ids[i : i + PIECE], 1) for i in range(0, len(ids) - 1, PIECE)]


def log_probabilities(llm: LLM, texts: list[Text]) -> list[tuple[float, bool]]:
    """Return the log-probability of each scored token, and whether it is the most probable token."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in texts], params, use_tqdm=False)
    found = []
    for output, (ids, first) in zip(outputs, texts, strict=True):
        entries: Any = output.prompt_logprobs
        for i in range(first, len(ids)):
            entry = entries[i][ids[i]]
            found.append((entry.logprob, entry.rank == 1))
    return found


def num_right(llm: LLM, asked: list[tuple[str, str]]) -> int:
    """Return how many questions get exactly the right answer."""
    chats: Any = [[{"role": "user", "content": question}] for question, _ in asked]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)
    return sum(out.outputs[0].text == answer for out, (_, answer) in zip(outputs, asked, strict=True))


def weight_bytes(llm: LLM) -> int:
    """Return the bytes of the model's weights, counting shared ones once."""
    model = llm.llm_engine.runner.model
    held = {x.data_ptr(): x.nbytes for x in (*model.parameters(), *model.buffers()) if not x.is_mkldnn}
    return sum(held.values())


def main() -> None:
    """Measure each precision, and print a row per text and precision and a JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default=str(DEMO), help="a directory, a GGUF file or a hub id; default: the bundled one"
    )
    parser.add_argument("--text", help="a file; default: Python's documentation")
    parser.add_argument("--tokens", type=int, default=8_000, help="of the text")
    parser.add_argument("--questions", type=int, default=400, help="of the bundled model")
    args = parser.parse_args()
    asked = questions(args.questions) if args.model == str(DEMO) else []
    exact: dict[str, list[float]] = {}
    results = []
    print("text     precision  log-probability  changes by  likeliest  right     MB", flush=True)
    for name, settings in PRECISIONS.items():
        with LLM(args.model, max_model_len=1024, kv_cache_bytes=1 << 28, **settings) as llm:
            tokenizer, right = llm.get_tokenizer(), num_right(llm, asked) if asked else None
            texts = {"english": english(tokenizer, args.text, args.tokens)}
            if asked:
                texts["answers"] = answered(tokenizer, asked)
            for text, pieces in texts.items():
                found = log_probabilities(llm, pieces)
                logprobs = [logprob for logprob, _ in found]
                changes = [
                    abs(x - y) for x, y in zip(logprobs, exact.setdefault(text, logprobs), strict=True)
                ]
                row: dict[str, Any] = {
                    "text": text,
                    "precision": name,
                    "logprob": statistics.fmean(logprobs),
                    "change": statistics.fmean(changes),
                    "likeliest": statistics.fmean(is_likeliest for _, is_likeliest in found),
                    "right": right if text == "answers" else None,
                    "weight_bytes": weight_bytes(llm),
                }
                results.append(row)
                figures = f"{row['logprob']:15.4g}  {row['change']:10.2g}  {row['likeliest']:9.4f}"
                megabytes = f"{row['weight_bytes'] / 1e6:.2f}"
                print(f"{text:8} {name:9}  {figures}  {row['right'] or '-':>5}  {megabytes:>5}", flush=True)
    print(json.dumps({"model": args.model, "python": platform.python_version(), "results": results}))


if __name__ == "__main__":
    main()
