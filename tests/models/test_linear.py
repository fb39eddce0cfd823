"""Linear layers in place of matrix products that transformers' models write out themselves."""

import copy
import weakref

import pytest
import torch
from torch import nn

from nanoengine import LLM
from nanoengine.backends.cpu.kernels import Kernels
from nanoengine.backends.cpu.packed_layers import PackedLinear, pack_weights
from nanoengine.models.linear_layers import use_linear_layers
from tests.helpers import ask, checkpoint, hf_model, random_prompts

MIXTURES = ["qwen2-moe", "qwen3-moe", "mixtral", "gpt-oss", "olmoe", "granite-moe", "deepseek-v3", "phimoe"]


def experts_of(model):
    """Return the experts of each layer that has any."""
    return [module for name, module in model.named_modules() if name.endswith("mlp.experts")]


@pytest.mark.parametrize("name", [*MIXTURES, "gpt2", "falcon"])
def test_every_weight_is_packed(name, tmp_path_factory):
    path, _ = checkpoint(name, tmp_path_factory)
    with LLM(str(path), num_kv_blocks=4) as llm:
        model = llm.llm_engine.runner.model
        for experts in experts_of(model):
            layers = [*experts.gate_up_proj, *experts.down_proj]
            assert len(layers) == 8
            assert {type(layer) for layer in layers} == {PackedLinear}
        # The others are embeddings, and the weights of routers, which their own code may read.
        weights = [key for key, x in model.named_parameters() if x.dim() > 1 and not key.endswith("bias")]
        others = {"embed_tokens", "wte", "wpe", "word_embeddings", "gate", "router"}
        assert {key.split(".")[-2] for key in weights} <= others


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "gpt2", "falcon"])
def test_logprobs_do_not_depend_on_the_rest_of_the_batch(name, tmp_path_factory):
    """To the last bit: experts, routers and layers of a model's own class once rounded as the batch was."""
    path, _ = checkpoint(name, tmp_path_factory)
    prompts = random_prompts([5, 9, 17, 30, 2, 40])

    def logprobs(llm, prompts):
        outputs = ask(llm, prompts, max_tokens=8, logprobs=0, prompt_logprobs=0)
        entries = [(*out.prompt_logprobs[1:], *out.outputs[0].logprobs) for out in outputs]
        return [[{token: x.logprob for token, x in entry.items()} for entry in each] for each in entries]

    with LLM(str(path), num_kv_blocks=60, block_size=8, enable_prefix_caching=False) as llm:
        assert logprobs(llm, prompts) == [logprobs(llm, [prompt])[0] for prompt in prompts]


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_bfloat16_experts_are_as_close_to_float32_as_those_of_transformers(name):
    model = hf_model(name)
    exact = experts_of(model)[0]
    torch.manual_seed(1)
    for parameter in exact.parameters():
        parameter.data = parameter.data.bfloat16().float()
    x, scores = torch.randn(300, 64).bfloat16(), torch.randn(300, 4).softmax(-1)
    weights, index = scores.topk(2)
    theirs = copy.deepcopy(exact).bfloat16()
    ours = nn.ModuleList([copy.deepcopy(theirs)])
    use_linear_layers(ours)
    pack_weights(ours, Kernels())

    def distance(experts, dtype):
        return (experts(x, index, weights.to(dtype)).float() - expected).norm()

    for dtype in torch.float32, torch.bfloat16:  # models differ in that of the weights
        with torch.no_grad():
            expected = exact(x.float(), index, weights.to(dtype).float())
            assert 0 < distance(ours[0], dtype) <= 1.1 * distance(theirs, dtype)


def test_experts_of_a_layer_are_freed_before_the_next_are_packed(monkeypatch):
    """Or a mixture would need twice its memory to be loaded."""
    model, plain = hf_model("mixtral").requires_grad_(False), {}
    use_linear_layers(model)

    def pack(layer, *_):
        here = layer.weight.untyped_storage().data_ptr()
        assert not any(other() for storage, layers in plain.items() for other in layers if storage != here)
        plain.setdefault(here, []).append(weakref.ref(layer))
        return nn.Identity()

    monkeypatch.setattr("nanoengine.backends.cpu.packed_layers.pack_linear", pack)
    pack_weights(model, None)
    assert sorted(map(len, plain.values()))[-4:] == [4] * 4  # of each layer two parameters, four experts
