"""Loads files from strangers: `python -m tests.strangers 7 1000` loads a thousand, from seed 7 on.

A seed changes some bytes, or the structure, of one file of a sound model: GGUF, safetensors, config.json, a
tokenizer or an adapter. The model then either loads and computes what transformers, PEFT or the package gguf
make of the same files, or it is refused with a ValueError. It takes at most a second, and little memory.
"""

import contextlib
import copy
import json
import logging
import math
import random
import shutil
import struct
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import peft
import psutil
import torch
import transformers
from safetensors.torch import load_file

from nanoengine import LLM, SamplingParams
from tests.checkpoints.test_gguf import Parts, change_parts, check_right, load
from tests.checkpoints.test_quantized_formats import merging_tokenizer, write_gguf
from tests.helpers import TINY

IDS, BYTES, SECONDS = [5, 6, 7, 8, 9], 1 << 30, 1.0  # limits: memory beyond the sound model's, CPU time
SETTINGS: dict[str, Any] = {"num_kv_blocks": 4, "block_size": 16, "max_num_seqs": 2, "max_model_len": 32}
FILES = (
    *("model.gguf", "model.gguf", "model-00001-of-00002.safetensors", "model.safetensors.index.json"),
    *("config.json", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("adapter/adapter_config.json", "adapter/adapter_model.safetensors"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, -1, 64, 2**31, 2**63, 10**30, 0.5, -0.5, 1e300, math.nan, math.inf),
    *("", "x", "1", "\ud800", "\0", "x" * 10**5, "F16", "I64", "F8_E4M3", "float16", "gelu", "llama", "yarn"),
    *([], {}, [1], [2, 3], ["x"], [[]], [None], {"x": 1}, {"rope_type": "yarn", "factor": 2.0}),
    *({"quant_method": "gptq"}, {"quant_method": "fp8"}, ["LlamaForCausalLM"], ["sliding_attention"] * 2),
)
NAMES = (
    *("quantization_config", "rope_scaling", "rope_theta", "layer_types", "sliding_window", "head_dim"),
    *("attention_bias", "text_config", "torch_dtype", "auto_map", "alpha_pattern", "use_dora"),
    *("chat_template", "added_tokens_decoder", "eos_token_id", "normalizer", "pre_tokenizer"),
    *("temperature", "x"),
)


@cache
def sound() -> Path:
    """Return a folder with a model in two shards, its tokenizer, an adapter, and the same as a GGUF file."""
    path, tokenizer = Path(tempfile.mkdtemp()), merging_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 32, "num_key_value_heads": 1}
    sizes |= {"num_attention_heads": 2, "vocab_size": len(tokenizer)}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**TINY, **sizes}))
    write_gguf(path / "model.gguf", model, "Q8_0", "qwen3", tokenizer=tokenizer)
    model.generation_config.update(temperature=0.5, do_sample=True)
    model.save_pretrained(path, max_shard_size="100KB")
    tokenizer.save_pretrained(path)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    for name, parameter in tuned.named_parameters():
        parameter.data += 0.1 * ("lora_B" in name)
    tuned.save_pretrained(str(path / "adapter"))
    return path


def change_json(tree: Any, rng: random.Random) -> None:
    """Make one change at a random depth: delete, replace, add, rename or move."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        key = rng.choice(keys) if keys else None
        if key is None or rng.random() < 0.4 or not isinstance(tree[key], dict | list) or not tree[key]:
            break
        tree = tree[key]
    kind, value = rng.randrange(5), copy.deepcopy(rng.choice(VALUES))
    if isinstance(tree, list) and (kind == 2 or key is None):
        tree.insert(rng.randrange(len(tree) + 1), value)
    elif key is None or kind == 2:
        tree[rng.choice(NAMES)] = value
    elif kind == 0:
        del tree[key]
    elif kind == 3 and isinstance(tree, dict):
        tree[rng.choice([*NAMES, *keys])] = tree.pop(key)
    else:
        tree[key] = tree[rng.choice(keys)] if kind == 4 else value


def change(name: str, content: bytes, rng: random.Random) -> bytes:
    """Return a file's content with changed bytes, mostly at its beginning, or with a changed structure."""
    if rng.random() < 0.4:
        changed, end = bytearray(content), rng.choice([len(content), min(len(content), 2000)])
        for _ in range(rng.choice((1, 1, 2, 4))):
            changed[rng.randrange(end)] = rng.choice((0, 1, 34, 44, 48, 128, 255, rng.randrange(256)))
        return bytes(changed[: None if rng.random() < 0.9 else rng.randrange(len(content))])
    start = 8 if name.endswith(".safetensors") else 0
    end = start + int.from_bytes(content[:start], "little") if start else len(content)
    is_gguf = name.endswith(".gguf")
    tree: Any = Parts(sound() / name) if is_gguf else json.loads(content[start:end])
    for _ in range(rng.choice((1, 1, 2))):
        (change_parts if is_gguf else change_json)(tree, rng)
    if is_gguf:
        return bytes(tree.join())
    text = json.dumps(tree).encode()
    length = rng.choice([len(text)] * 9 + [0, len(text) + 1, 2**31, 2**63])
    return (struct.pack("<Q", length) if start else b"") + text + content[end:]


def start_model(model: Path, lora: Path | None, impl: Any = "auto") -> tuple[Any, torch.dtype]:
    """Load a model, and return its answer to `IDS` and its dtype. A text only has to be answered."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    with LLM(str(model), lora=lora, model_impl=impl, **SETTINGS) as llm:
        prompts: list[Any] = [{"prompt_token_ids": IDS}]
        prompts += ["Don't 12345 fooBar \n\n日本"] * (llm.get_tokenizer() is not None)
        return llm.generate(prompts, params, use_tqdm=False)[0], llm.llm_engine.started.loaded.dtype


def check_answer(answer: Any, dtype: torch.dtype, model: Path, lora: Path | None) -> None:
    """Compare log-probabilities with those of transformers and PEFT, if they accept the files."""
    settings: Any = {"dtype": dtype, "attn_implementation": "eager"}  # fused attention hides some NaN
    found = [entry[i].logprob for i, entry in zip(IDS[1:], answer.prompt_logprobs[1:], strict=True)]
    try:
        theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(model, **settings)
        if lora is not None:
            theirs = peft.PeftModel.from_pretrained(theirs, str(lora))
            if {*peft.get_peft_model_state_dict(theirs)} != {*load_file(lora / "adapter_model.safetensors")}:
                return  # the config names other layers than the file has
        with torch.inference_mode():
            logits = theirs(torch.tensor([IDS])).logits[0, :-1].float()
    except Exception:
        return
    expected = logits.log_softmax(-1)[range(len(found)), IDS[1:]]
    near = 1e-3 if dtype == torch.float32 else 0.2
    if logits.abs().max() < 1e3:  # false for NaN
        torch.testing.assert_close(torch.tensor(found), expected, rtol=near, atol=near)


def try_file(seed: int) -> str:
    """Change the file of a seed and load it. Returns "right" or "refused", or else raises."""
    rng, folder, answer = random.Random(seed), sound(), None
    name = rng.choice(FILES)
    model = folder / name if name.endswith(".gguf") else folder
    lora = folder / "adapter" if name.startswith("adapter") else None
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(change(name, content, rng))
    began = time.process_time()
    try:
        with contextlib.suppress(ValueError):
            answer, dtype = start_model(model, lora, rng.choice(["auto", "auto", "transformers"]))
        assert time.process_time() - began < SECONDS, f"{name} takes too long"
        if answer is not None and model != folder:
            check_right(model, *load(model))
        elif answer is not None and not name.startswith("tokenizer"):
            check_answer(answer, dtype, model, lora)
    finally:
        (folder / name).write_bytes(content)
    return "refused" if answer is None else "right"


def try_files(start: int, number: int) -> Counter[str]:
    """Try the files of these seeds, with little memory. Returns how many were right, refused and found."""
    for lora in None, sound() / "adapter":  # import what is needed
        check_answer(*start_model(sound(), lora, "transformers"), sound(), lora)
    process = psutil.Process()
    before = process.rlimit(psutil.RLIMIT_AS)
    process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms + BYTES, before[1]))
    results = Counter[str]()
    for seed in range(start, start + number):
        try:
            results[try_file(seed)] += 1
        except BaseException as error:  # also a panic of Rust's
            results["found"] += 1
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    process.rlimit(psutil.RLIMIT_AS, before)
    shutil.rmtree(sound())
    sound.cache_clear()
    return results


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    results = try_files(*map(int, sys.argv[1:]))
    print(dict(results))
    sys.exit(results["found"] > 0)
