"""llama.cpp in the benchmark: a checkpoint written for it, and, where it is installed, its own answers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.llama_cpp import LlamaCpp, prepare
from nanoengine import LLM, SamplingParams
from tests.checkpoints.test_quantized_formats import check_equal, gguf_name
from tests.helpers import checkpoint, open_checkpoint, random_prompts, tokens_of

gguf = pytest.importorskip("gguf")


def written(path: Path, directory: Path, **changes: Any) -> tuple[dict[str, Any], Any]:
    """Return the settings for the engine's process, and the file as gguf reads it."""
    settings = {"model": str(path), "load_format": "auto", "dtype": "float32", "max_model_len": 512} | changes
    own = prepare(open_checkpoint(str(path)), settings, str(directory))
    return own, gguf.GGUFReader(own["model"])


def tensors(reader: Any) -> dict[str, torch.Tensor]:
    """Return a file's tensors by name, as float32."""
    result = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(tensor.data.copy())
        if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
            values = values.view(torch.bfloat16)
        result[tensor.name] = values.float()
    return result


NAMES = "qwen3", "qwen2 tied", "llama without gqa", "llama3 rope", "llama linear rope", "llama with biases"


@pytest.mark.parametrize("name", [*NAMES, "qwen3 tied, one kv head"])
def test_a_written_file_computes_what_the_checkpoint_does(name, tmp_path, tmp_path_factory):
    """The engine's own reader of GGUF files knows llama.cpp's names, rope pairs and scaled frequencies."""
    path, model = checkpoint(name, tmp_path_factory)
    own, reader = written(path, tmp_path)
    assert ("output.weight" in tensors(reader)) == ("tied" not in name)
    assert reader.fields["tokenizer.ggml.model"].contents() == "none"
    check_equal(model, own["model"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matrices_are_rounded_to_the_run_s_dtype_and_vectors_are_not(dtype, tmp_path, qwen3):
    given = {gguf_name(name): tensor for name, tensor in load_file(qwen3 / "model.safetensors").items()}
    own, reader = written(qwen3, tmp_path, dtype=dtype)
    for name, tensor in tensors(reader).items():
        assert torch.equal(tensor, given[name].to(getattr(torch, dtype)).float()), name
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["blk.1.attn_q.weight"] == {"bfloat16": "BF16", "float16": "F16"}[dtype]
    assert types["blk.1.attn_norm.weight"] == "F32"
    token_bytes = 2 * 2 * 2 * 32 * 2  # K and V, layers, heads, head_dim, bytes
    assert own["cache_tokens"] == min((4 << 30) // token_bytes, 256 * 512)


def test_random_weights_have_the_config_s_shapes(tmp_path, qwen3):
    (tmp_path / "config.json").write_bytes((qwen3 / "config.json").read_bytes())
    held = tensors(written(tmp_path, tmp_path, load_format="dummy")[1])
    given = load_file(qwen3 / "model.safetensors")
    assert {name: x.shape for name, x in held.items()} == {gguf_name(n): x.shape for n, x in given.items()}
    assert 0.1 < held["blk.0.attn_q.weight"].std() < 0.5  # TINY's initializer_range is 0.25


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2", "GPT2LMHeadModel is not written for llama.cpp"),
        ("qwen2 sliding from layer 1", "no sliding window"),
        ("llama yarn rope with mscale", "cannot have its yarn rope"),
    ],
)
def test_models_that_llama_cpp_computes_differently_are_refused(name, message, tmp_path, tmp_path_factory):
    path, _ = checkpoint(name, tmp_path_factory)
    with pytest.raises(ValueError, match=message):
        written(path, tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_gives_our_greedy_tokens(name, tmp_path, tmp_path_factory):
    """More sequences than fit at once, and a prompt longer than a batch."""
    pytest.importorskip("llama_cpp")
    path, _ = checkpoint(name, tmp_path_factory)
    prompts = random_prompts([1, 2, 31, 150, 300, 17, 64])
    output_lens = [20, 1, 12, 20, 8, 30, 5]
    with LLM(str(path), num_kv_blocks=100) as llm:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in output_lens]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        expected = tokens_of(outputs)
    own, _ = written(path, tmp_path)
    engine = LlamaCpp(own["model"], threads=1, cache_tokens=512, exact=True)
    engine.max_tokens = 200
    requests, measured = engine.serve(prompts, output_lens, temperature=0)
    assert [request.tokens[request.num_prompt :] for request in requests] == expected
    assert measured["output_tokens"] == sum(output_lens)
    assert measured["steps"] > max(output_lens)  # not all at once
    assert len(measured["ttft"]) == 7
    with pytest.raises(ValueError, match="needs 520 tokens, the cache has 512"):
        engine.serve([[1] * 500], [20], temperature=0)
    engine.close()
