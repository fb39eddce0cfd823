"""Loading: strict about every tensor, clear about every mistake, and without side effects."""

import json
import shutil

import pytest
import tokenizers
import tokenizers.models
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanoengine import LLM, SamplingParams
from nanoengine.weights import resolve_dtype
from tests.helpers import checkpoint, greedy, hf_model

NAME = "qwen3"


@pytest.fixture
def copy(tmp_path, tmp_path_factory):
    """A checkpoint directory to damage."""
    shutil.copytree(checkpoint(NAME, tmp_path_factory)[0], tmp_path / "model")
    return tmp_path / "model"


def edit(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")


def refuse(path, message, error=ValueError, **settings):
    """Loading fails with that message, and leaves torch's defaults as they were."""
    before = torch.get_default_dtype(), torch.get_default_device()
    with pytest.raises(error, match=message):
        LLM(str(path), num_kv_blocks=4, **settings)
    assert (torch.get_default_dtype(), torch.get_default_device()) == before


def test_a_missing_tensor_is_named(copy):
    edit(copy, lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"))
    refuse(copy, r"lacks 1 tensors, the first is 'model\.layers\.1\.self_attn\.k_proj\.weight'")


def test_an_unexpected_tensor_is_named(copy):
    edit(copy, lambda t: t.update({"model.layers.0.mystery.weight": torch.zeros(2)}))
    refuse(copy, r"'model\.layers\.0\.mystery\.weight' which the architecture does not have")


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(copy):
    edit(copy, lambda t: t.update({"model.norm.weight": torch.zeros(63)}))
    refuse(copy, r"'model\.norm\.weight' has shape \(63,\), the config asks for \(64,\)")


def test_a_truncated_file_is_reported_as_damaged(copy):
    data = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(data[: len(data) // 2])
    refuse(copy, r"model\.safetensors is damaged")


def test_a_directory_without_safetensors_is_refused_rather_than_run_uninitialised(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    refuse(copy, r"holds no \*\.safetensors; pickled weights")


def test_an_empty_directory_a_file_and_a_wrong_path_are_told_apart(tmp_path):
    refuse(tmp_path, r"holds no config\.json")
    (tmp_path / "file").write_text("x")
    refuse(tmp_path / "file", "got the file")
    refuse(tmp_path / "absent", "neither a directory here nor a hub id")
    refuse("no-such-model", "neither a directory here nor a hub id")


def test_sharded_files_load_like_a_single_one_and_a_missing_shard_is_named(tmp_path, tmp_path_factory):
    model = hf_model(NAME)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    prompt = [1, 2, 3]
    with LLM(str(tmp_path), num_kv_blocks=8) as llm:
        output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
    assert output[0].outputs[0].token_ids == greedy(model, prompt, 10)
    shards[1].unlink()
    refuse(tmp_path, f"lacks the shard {shards[1].name}")


def test_a_tied_model_ignores_a_saved_head(tmp_path, tmp_path_factory):
    path, model = checkpoint("qwen2 tied", tmp_path_factory)
    shutil.copytree(path, tmp_path / "model")
    edit(tmp_path / "model", lambda t: t.update({"lm_head.weight": torch.zeros(128, 64)}))
    with LLM(str(tmp_path / "model"), num_kv_blocks=8) as llm:
        assert llm.runner.model.lm_head.weight is llm.runner.model.embed_tokens.weight
        output = llm.generate([7, 8], SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
    assert output[0].outputs[0].token_ids == greedy(model, [7, 8], 10)


def test_another_architecture_is_refused(copy):
    config = json.loads((copy / "config.json").read_text())
    config["architectures"] = ["GemmaForCausalLM"]
    (copy / "config.json").write_text(json.dumps(config))
    refuse(copy, "'GemmaForCausalLM' is not supported")


def test_dummy_weights_need_only_a_config(copy):
    for file in copy.iterdir():
        if file.name != "config.json":
            file.unlink()
    with LLM(str(copy), load_format="dummy", num_kv_blocks=8, dtype="bfloat16") as llm:
        assert llm.get_tokenizer() is None
        output = llm.generate([1, 2, 3], SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0]
        assert (len(output.token_ids), output.text) == (4, "")
        with pytest.raises(ValueError, match="no tokenizer"):
            llm.generate("text", use_tqdm=False)
        with pytest.raises(ValueError, match="stop needs a tokenizer"):
            llm.generate([1], SamplingParams(stop="x"), use_tqdm=False)


def test_dtype_auto_is_the_checkpoints_own(copy):
    config = json.loads((copy / "config.json").read_text())
    config["dtype"] = "bfloat16"
    (copy / "config.json").write_text(json.dumps(config))
    with LLM(str(copy), num_kv_blocks=4) as llm:
        assert llm.runner.model.norm.weight.dtype == torch.bfloat16
        assert llm.runner.caches[0].k.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["int8", "float64", "bf16", torch.int32])
def test_an_unknown_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match="dtype must be auto, bfloat16"):
        resolve_dtype(dtype, None)


def test_every_eos_id_of_the_generation_config_is_known(copy):
    (copy / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [5, 9], "temperature": 0.3, "max_new_tokens": 77})
    )
    config = json.loads((copy / "config.json").read_text())
    config["eos_token_id"] = [7, 500, -1]  # the last two are no tokens
    (copy / "config.json").write_text(json.dumps(config))
    _tokenizer_with_eos(3).save_pretrained(copy)
    with LLM(str(copy), num_kv_blocks=4) as llm:
        assert llm.checkpoint.eos_token_ids == (3, 7, 5, 9)
        params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_p, params.max_tokens) == (0.3, 1.0, 77)


def _tokenizer_with_eos(eos_id):
    vocabulary = {f"t{i}": i for i in range(10)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=f"t{eos_id}")


def test_different_seeds_give_different_dummy_weights(copy):
    weights = []
    for seed in (0, 0, 1):
        with LLM(str(copy), load_format="dummy", num_kv_blocks=4, seed=seed) as llm:
            weights.append(llm.runner.model.layers[0].mlp.down_proj.weight.clone())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
