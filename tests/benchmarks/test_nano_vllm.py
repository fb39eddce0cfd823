"""nano-vllm as an engine of the benchmarks: the checkpoint it is given, and what it is asked."""

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import tests.nanovllm
from benchmarks.nano_vllm import load, prepare
from nanoengine.apps.workloads import SHAPES
from nanoengine.models.checkpoint import open_checkpoint
from tests.helpers import checkpoint

SHAPE = SHAPES["tiny"] | {"dtype": "bfloat16", "vocab_size": 512}


def prepared(model, directory, **changes):
    """Prepare a model, a config with random weights or a checkpoint, for nano-vllm."""
    settings = {"model": str(model), "load_format": "dummy", "dtype": "bfloat16", "max_model_len": 512}
    return prepare(open_checkpoint(str(model)), settings | {"device": "cuda"} | changes, str(directory))


@pytest.fixture
def shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_shape_is_served_with_random_weights_and_a_tokenizer_beside_it(is_tied, shape, monkeypatch):
    (shape / "config.json").write_text(json.dumps(SHAPE | {"tie_word_embeddings": is_tied}))
    monkeypatch.setitem(sys.modules, "nanovllm", tests.nanovllm)
    settings = prepared(shape, shape)
    assert settings["model"] != str(shape)  # where the other engines have a config alone
    weights = load_file(Path(settings["model"], "model.safetensors"))
    assert ("lm_head.weight" in weights) != is_tied
    assert 0.01 < weights["model.layers.0.mlp.up_proj.weight"].std() < 0.03
    run = load(settings)
    prompts, output_lens = [[1, 2, 3], [500], [7] * 500], [5, 8, 12]
    measured = run(prompts, output_lens)
    assert measured["output_tokens"] == 25
    assert measured["seconds"] > 0


def test_a_checkpoint_is_served_as_it_is(tmp_path, qwen3):
    assert prepared(qwen3, tmp_path, load_format="auto", dtype="float32")["model"] == str(qwen3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("llama3 rope", "float32", "supports only Qwen3ForCausalLM, got LlamaForCausalLM"),
        ("gemma", "float32", "supports only Qwen3ForCausalLM, got GemmaForCausalLM"),
        ("qwen3 yarn rope", "float32", "no sliding window and no scaled rope"),
        ("qwen3", "bfloat16", r"computes in the checkpoint's own dtype, torch\.float32"),
    ],
)
def test_models_that_nano_vllm_would_misread_are_refused(name, dtype, message, tmp_path, tmp_path_factory):
    path, _ = checkpoint(name, tmp_path_factory)
    with pytest.raises(ValueError, match=message):
        prepared(path, tmp_path, dtype=dtype)
