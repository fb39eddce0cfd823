"""The decoder against transformers, on tiny random checkpoints of every family it serves."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from nanoengine import LLM
from nanoengine.backends.cpu.packed_layers import OneDNNLinear, PackedLinear
from nanoengine.checkpoints.decoder_config import DecoderConfig
from nanoengine.models.decoder import RMSNorm
from tests import helpers
from tests.helpers import ARCHITECTURES, TINY, ask, check_answers, checkpoint, random_prompts, slow

LENGTHS = [1, 2, 15, 16, 17, 64, 300]
NUM_NEW = 18


# In PyTorch by default: one of each family, and settings that are computed in a way of their own.
LIKE_OTHERS = "qwen2 tied", "mistral"
IN_PYTORCH = "qwen3", "qwen2 sliding from layer 1", "llama with biases", "llama odd sizes", "mistral sliding"


@pytest.mark.parametrize(
    ("name", "enforce_eager"),
    [
        *(pytest.param(x, False, marks=pytest.mark.slow if x in LIKE_OTHERS else ()) for x in ARCHITECTURES),
        *(pytest.param(x, True, marks=() if x in IN_PYTORCH else pytest.mark.slow) for x in ARCHITECTURES),
    ],
)
def test_greedy_tokens_equal_transformers_alone_and_in_a_batch(name, enforce_eager, tmp_path_factory):
    path, reference = checkpoint(name, tmp_path_factory)
    prompts = random_prompts(LENGTHS)
    settings = {"num_kv_blocks": 100, "block_size": 16, "enable_prefix_caching": False}
    with LLM(str(path), enforce_eager=enforce_eager, **settings) as llm:
        assert llm.llm_engine.started.loaded.dtype == torch.float32
        assert (llm.llm_engine.runner.device.kernels is None) == enforce_eager
        for asked in (prompts * 2, *([prompts[index]] for index in (0, 6))):
            check_answers(llm, reference, asked, NUM_NEW)


@pytest.mark.parametrize("enforce_eager", [False, *slow(True)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["qwen3", "llama with biases", *slow("llama yarn rope")])
def test_logprobs_are_as_accurate_as_transformers_in_any_dtype(name, dtype, enforce_eager, tmp_path_factory):
    """The distance to float32, over a whole prompt, is at most that of transformers' own eager attention."""
    path, reference = checkpoint(name, tmp_path_factory)
    prompt = random_prompts([90])[0]
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    exact = helpers.logprobs_of(reference, prompt)
    theirs_error = helpers.logprobs_of(theirs, prompt) - exact
    settings = {"num_kv_blocks": 20, "enforce_eager": enforce_eager, "max_logprobs": -1}
    with LLM(str(path), dtype=dtype, **settings) as llm:
        entries = ask(llm, prompt, max_tokens=1, prompt_logprobs=100)[0].prompt_logprobs
    found = [(i, t, x.logprob) for i, one in enumerate(entries[1:]) for t, x in one.items()]
    error = torch.tensor([logprob - exact[i, t] for i, t, logprob in found])
    assert len(error) >= 89 * 100
    assert error.square().mean().sqrt() <= 1.1 * theirs_error[:-1].square().mean().sqrt() + 1e-5


@pytest.mark.parametrize("name", ["llama with biases", "qwen3 tied, one kv head"])
def test_packing_the_weights_for_the_cpu_changes_no_result(name, tmp_path_factory, monkeypatch):
    path, _ = checkpoint(name, tmp_path_factory)

    def results():
        with LLM(str(path), dtype="bfloat16", num_kv_blocks=20) as llm:
            layouts.append(type(llm.llm_engine.runner.model.lm_head))
            linear = [m for m in llm.llm_engine.runner.model.modules() if "Linear" in type(m).__name__]
            assert {type(module) for module in linear} == {layouts[-1]}
            outputs = ask(llm, random_prompts([1, 20, 70]), max_tokens=1, logprobs=0)
            return [next(iter(out.outputs[0].logprobs[0].values())).logprob for out in outputs]

    layouts: list[type] = []
    ours = results()
    monkeypatch.setattr("nanoengine.backends.cpu.kernels.Kernels.can_multiply", lambda self, *_: False)
    assert results() == pytest.approx(ours, abs=0.02)
    monkeypatch.setattr("nanoengine.backends.cpu.packed_layers.pack_linear", lambda layer, *_: layer)
    assert results() == pytest.approx(ours, abs=0.02)
    assert layouts[2] is nn.Linear
    assert layouts[1] is (OneDNNLinear if torch.ops.mkldnn._is_mkldnn_bf16_supported() else nn.Linear)
    if shutil.which("g++"):
        assert layouts[0] is PackedLinear


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported: LlamaForCausalLM"),
        ({"rope_parameters": DYNAMIC}, "rope type 'dynamic'.*supported: default, linear, llama3, yarn"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": PARTIAL}, "partial_rotary_factor"),
    ],
)
def test_an_unsupported_setting_is_an_error_that_lists_the_supported_ones(changes, message):
    config = LlamaConfig(**{**TINY, "architectures": ["LlamaForCausalLM"], **changes})
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_hf(config)


def test_rope_settings_in_the_format_of_transformers_4_are_understood():
    fields = {**LlamaConfig(**TINY, architectures=["LlamaForCausalLM"]).to_dict(), "rope_parameters": None}
    scaling = {"type": "linear", "factor": 4.0}
    config = SimpleNamespace(**{**fields, "rope_theta": 5000.0, "rope_scaling": scaling})
    rope = DecoderConfig.from_hf(config).rope
    assert (rope["rope_type"], rope["rope_theta"], rope["factor"]) == ("linear", 5000.0, 4.0)
    # A stray dict beside a type is not the setting of a layer type.
    rope = {"rope_type": "linear", "factor": 4.0, "head_dim": {"rope_type": "yarn", "factor": 2.0}}
    config = LlamaConfig(**TINY, architectures=["LlamaForCausalLM"], rope_parameters=rope)
    assert DecoderConfig.from_hf(config).rope["rope_type"] == "linear"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_rounds_where_transformers_does(dtype):
    ours, theirs = RMSNorm(64, 1e-6).to(dtype), LlamaRMSNorm(64, 1e-6).to(dtype)
    x, weight = torch.randn(100, 64).to(dtype) * 3, torch.randn(64).to(dtype)
    ours.weight.data, theirs.weight.data = weight, weight
    before = x.clone()
    assert torch.equal(ours(x)[0], theirs(x))
    assert torch.equal(x, before)
