"""Weights that change. The oracle is an LLM that was loaded from the other checkpoint."""

import asyncio
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from nanoengine import LLM, AsyncLLM, SamplingParams
from tests import doubles
from tests.helpers import TINY, ask, checkpoint, finish, hf_model, random_prompts, slow

SETTINGS = {"max_num_seqs": 4, "num_kv_blocks": 64, "block_size": 8, "pin_threads": False}


def other(name):
    """Return weights of the same shapes as `checkpoint`'s, with other values."""
    model = hf_model(name)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter[torch.randperm(len(parameter), generator=generator)])
    return model


def answers(llm):
    """Return what weights determine: tokens and their log-probabilities. Prompts use the prefix cache."""
    outputs = ask(llm, random_prompts([5, 21]), max_tokens=6, ignore_eos=True, logprobs=1)
    return [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs]


def check_replaced(name, tmp_path_factory, tmp_path, one_by_one=False, **settings):
    model = other(name)
    model.save_pretrained(tmp_path / "other")
    settings = {**SETTINGS, **settings}
    with LLM(tmp_path / "other", **settings) as llm:
        wanted = answers(llm)
    with LLM(checkpoint(name, tmp_path_factory)[0], **settings) as llm:
        assert answers(llm) != wanted
        if one_by_one:
            for pair in model.named_parameters():
                llm.update_weights([pair])
        else:
            llm.update_weights(model.named_parameters())
        assert answers(llm) == wanted, "or prefixes of the other weights were used"


ROUNDED = "qwen3", "qwen3 tied, one kv head", "gemma3", "mixtral"
OTHERS = "llama with biases", "llama odd sizes", "phi3", "gpt2", "gpt-oss", "deepseek-v3", "falcon new"
HOW: list[tuple[str, dict[str, Any]]] = [
    *((name, {"one_by_one": each}) for name in ROUNDED + OTHERS for each in (False, True)),
    *((name, {"quantization": bits}) for name in ROUNDED for bits in ("int8", "int4")),
]
# Each model in both dtypes, and each dtype with both values of `how`.
DTYPES = "float32", "bfloat16"
CASES = [(name, {"dtype": DTYPES[(i + i // 2) % 2], **how}) for i, (name, how) in enumerate(HOW)]


@pytest.mark.parametrize(("name", "settings"), [CASES[0], *slow(*CASES[1:])])
def test_new_weights_give_the_answers_of_loaded_ones(name, settings, tmp_path_factory, tmp_path):
    check_replaced(name, tmp_path_factory, tmp_path, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_untied_head_stays_untied_if_the_config_says_tied(dtype, tmp_path_factory, tmp_path):
    path, model = checkpoint("qwen2 tied", tmp_path_factory)
    embedding = model.model.embed_tokens.weight.detach()
    pairs = [("model.embed_tokens.weight", embedding.flip(0)), ("lm_head.weight", embedding.roll(1, 0))]
    model.config.save_pretrained(tmp_path)
    tensors = {name: x.clone() for name, x in [*model.named_parameters(), ("lm_head.weight", embedding * 2)]}
    save_file(tensors, tmp_path / "model.safetensors")
    with LLM(tmp_path, **SETTINGS, dtype=dtype) as llm:
        llm.update_weights(pairs)
        replaced = answers(llm)
    save_file({**tensors, **{name: x.clone() for name, x in pairs}}, tmp_path / "model.safetensors")
    with LLM(tmp_path, **SETTINGS, dtype=dtype) as llm:
        assert answers(llm) == replaced
    with LLM(path, **SETTINGS, dtype=dtype) as llm:
        before = answers(llm)
        with pytest.raises(ValueError, match=r"'lm_head\.weight' differs from"):
            llm.update_weights(pairs)
        assert answers(llm) == before
        llm.update_weights([("lm_head.weight", pairs[0][1])])  # another name of the same
        (row,) = llm.llm_engine.runner.model.embed_tokens(torch.tensor([0]))
        assert torch.equal(row, embedding[-1].to(getattr(torch, dtype)))


def test_nothing_changes_if_one_tensor_is_refused(tmp_path_factory):
    path, model = checkpoint("qwen3", tmp_path_factory)
    name, good = "model.norm.weight", torch.zeros_like(model.model.norm.weight)
    with LLM(path, **SETTINGS) as llm:
        before = answers(llm)
        for error, bad in (
            (ValueError, ("model.norm.bias", good)),
            (ValueError, (name, good[1:])),
            (ValueError, (name, good + 1)),
            (TypeError, (name, good.int())),
            (TypeError, (name, good.to("meta"))),
            (TypeError, (name, good.tolist())),
        ):
            with pytest.raises(error, match=bad[0]):
                llm.update_weights([(name, good), bad])
        assert answers(llm) == before


def test_weights_are_updated_only_between_requests_and_without_a_store_that_outlives_them(qwen3, tmp_path):
    with LLM(qwen3, **SETTINGS, kv_store=tmp_path) as llm, pytest.raises(ValueError, match="kv_store"):
        llm.update_weights([])
    with LLM(qwen3, **SETTINGS) as llm:
        llm.add_request("a", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=2, ignore_eos=True))
        with pytest.raises(RuntimeError, match="unfinished requests"):
            llm.update_weights([])
        finish(llm)
        llm.update_weights([])
    with pytest.raises(RuntimeError, match="closed"):
        llm.update_weights([])


def test_an_async_engine_takes_new_weights_between_steps(tmp_path_factory, tmp_path):
    model = other("qwen3")
    model.save_pretrained(tmp_path / "other")
    prompt, params = {"prompt_token_ids": [1, 2, 3]}, SamplingParams(temperature=0, max_tokens=8)

    async def answer(engine, number):
        return [one async for one in engine.generate(prompt, params, number)][-1].outputs[0].token_ids

    async def main():
        async with AsyncLLM(tmp_path / "other", **SETTINGS) as engine:
            wanted = await answer(engine, "wanted")
        async with AsyncLLM(checkpoint("qwen3", tmp_path_factory)[0], **SETTINGS) as engine:
            assert await answer(engine, "before") != wanted
            await engine.update_weights(model.named_parameters())
            assert await answer(engine, "after") == wanted

    asyncio.run(main())


@pytest.mark.parametrize("name", [*ROUNDED[1::2], *slow(*ROUNDED[::2], "gpt2")])
@pytest.mark.parametrize("form", ["int4", *slow("int8")])
def test_rounded_weights_change_on_a_gpu_too(name, form, in_float32, monkeypatch, tmp_path_factory, tmp_path):
    doubles.install_linear(monkeypatch)
    settings = {"dtype": "float32", "num_kv_blocks": 8, "block_size": 256, "max_model_len": 64}
    check_replaced(name, tmp_path_factory, tmp_path, one_by_one=True, quantization=form, **settings)


@pytest.mark.slow
def test_tensors_of_one_quantized_layer_are_updated_together(tmp_path):
    config = transformers.Qwen3Config(**{**TINY, "head_dim": 22})  # q, k and v: 88, 44 and 44 rows
    model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path)
    tensors = {name: x.detach().flip(0) for name, x in model.named_parameters()}
    key = "model.layers.0.self_attn.k_proj.weight"
    with LLM(tmp_path, **SETTINGS, quantization="int4") as llm:
        before = answers(llm)
        with pytest.raises(ValueError, match=f"{key}' shares a quantized layer"):
            llm.update_weights([("model.norm.weight", tensors["model.norm.weight"]), (key, tensors[key])])
        assert answers(llm) == before
        llm.update_weights((key.replace("k_proj", part), tensors[key.replace("k_proj", part)])
                           for part in ("q_proj", "v_proj", "k_proj"))  # fmt: skip
        assert answers(llm) != before
