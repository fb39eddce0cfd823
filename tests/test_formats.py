"""Checkpoints in few bits: each format's own layout, written here from its definition or by its own tools.

The oracle is transformers with the weights that the integers stand for.
"""

import json
import re

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoengine import LLM, SamplingParams
from nanoengine.backends.quantized import Quantized
from nanoengine.demo.train import build_tokenizer
from nanoengine.models.gguf import READERS
from tests.helpers import DEMO, greedy, hf_model, random_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=0)


def pack_rows(numbers, bits, order=range(8)):
    """Numbers (R, C) from 0 on, 32 / bits of them in a word: (R, C * bits / 32) int32."""
    in_word = 32 // bits
    words = np.zeros((numbers.shape[0], numbers.shape[1] // in_word), dtype=np.uint32)
    for i in range(in_word):
        words |= numbers[:, order[i] if in_word == 8 else i :: in_word].numpy().astype(np.uint32) << bits * i
    return torch.from_numpy(words.view(np.int32))


def random_parts(shape, bits, group):
    """Numbers from 0 on (N, I), zeros and scales (N, I / group), and the weight that they stand for."""
    numbers = torch.randint(0, 1 << bits, shape)
    zeros = torch.randint(1, 1 << bits, (shape[0], shape[1] // group))
    scales = ((torch.rand(zeros.shape) + 0.5) * 1.2 / (1 << bits)).half()
    return numbers, zeros, scales


def stands_for(numbers, zeros, scales):
    group = numbers.shape[1] // scales.shape[1]
    counted = numbers.unflatten(1, (-1, group)) - zeros.unsqueeze(2)
    return (counted.double() * scales.double().unsqueeze(2)).flatten(1)


def gptq(shape, bits=4, group=32, version="gptq", order=None):
    numbers, zeros, scales = random_parts(shape, bits, group)
    groups = torch.arange(shape[1]) // group
    weight = stands_for(numbers, zeros, scales)
    if order is not None:  # inputs of a group lie anywhere
        groups, weight, numbers = (
            groups[order(shape[1])],
            weight[:, order(shape[1])],
            numbers[:, order(shape[1])],
        )
    return {
        "qweight": pack_rows(numbers, bits).T,
        "qzeros": pack_rows(zeros.T - int(version == "gptq"), bits),
        "scales": scales.T,
        "g_idx": groups.int(),
    }, weight


def awq(shape, group=32):
    numbers, zeros, scales = random_parts(shape, 4, group)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        "qweight": pack_rows(numbers.T, 4, order),
        "qzeros": pack_rows(zeros.T, 4, order),
        "scales": scales.T,
    }, stands_for(numbers, zeros, scales)


def packed(shape, bits=4, group=32, symmetric=True):
    group = group or shape[1]
    numbers, zeros, scales = random_parts(shape, bits, group)
    if symmetric:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    parts = {
        "weight_packed": pack_rows(numbers, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = pack_rows(zeros.T, bits).T
    return parts, stands_for(numbers, zeros, scales)


def int_quantized(shape):
    numbers, _, scales = random_parts(shape, 8, shape[1])
    integers = (numbers - 128).to(torch.int8)
    zeros = torch.zeros_like(scales)
    return {"weight": integers, "weight_scale": scales, "input_scale": torch.ones(1)}, stands_for(
        integers, zeros, scales
    )


def float_quantized(shape, scales_shape):
    weight = (torch.randn(shape) * 2).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(scales_shape) * 0.2
    rows, columns = shape[0] // scales_shape[0], shape[1] // scales_shape[-1]
    wide = scales.view(scales_shape[0], -1).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return {"weight": weight, "weight_scale": scales}, weight.double() * wide.double()


def nf4(shape, nested=True):
    table = torch.tensor([-1.0, *sorted(torch.rand(14).tolist()), 1.0])
    numbers = torch.randint(0, 16, shape).flatten()
    blocks = numbers.numel() // 64
    parts = {
        "weight": (numbers[::2] << 4 | numbers[1::2]).to(torch.uint8).unsqueeze(1),
        "weight.quant_map": table,
    }
    state = {"blocksize": 64, "shape": list(shape), "quant_type": "nf4", "dtype": "float32"}
    if nested:
        codes, of_codes = torch.randint(0, 256, (blocks,)), torch.rand(256)
        larger = torch.rand(-(-blocks // 256))
        scales = of_codes[codes] * larger.repeat_interleave(256)[:blocks] + 0.125
        parts |= {"weight.absmax": codes.to(torch.uint8), "weight.nested_quant_map": of_codes}
        parts["weight.nested_absmax"] = larger
        state |= {"nested_blocksize": 256, "nested_offset": 0.125, "nested_dtype": "float32"}
    else:
        scales = parts["weight.absmax"] = torch.rand(blocks)
    text = json.dumps(state).encode()
    parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    return parts, (table[numbers] * scales.repeat_interleave(64)).view(shape).double()


def int8_of_bitsandbytes(shape):
    integers, scales = torch.randint(-127, 128, shape, dtype=torch.int8), torch.rand(shape[0]) * 0.6
    return {"weight": integers, "SCB": scales}, integers.double() * (scales.double() / 127).unsqueeze(1)


def compressed(form, bits, **fields):
    weights = {"num_bits": bits, "type": "int"}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        **fields,
    }


def scattered(num_inputs):
    return torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_inputs))


GPTQ = {"quant_method": "gptq", "group_size": 32, "sym": False, "desc_act": False}
# What config.json says, what writes a weight, and whether a CPU keeps it in its bits
WRITTEN = {
    "gptq": ({**GPTQ, "bits": 4}, gptq, 4),
    "gptq, second version": (
        {**GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"},
        lambda shape: gptq(shape, version="gptq_v2"),
        4,
    ),
    "gptq in 8 bits": ({**GPTQ, "bits": 8}, lambda shape: gptq(shape, 8), 8),
    "gptq, one group": ({**GPTQ, "bits": 4, "group_size": -1}, lambda shape: gptq(shape, group=shape[1]), 4),
    "gptq, inputs in another order": (
        {**GPTQ, "bits": 4, "desc_act": True},
        lambda shape: gptq(shape, order=scattered),
        None,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq, 4),
    "compressed": (compressed("pack-quantized", 4), packed, 4),
    "compressed, zeros": (compressed("pack-quantized", 4), lambda shape: packed(shape, symmetric=False), 4),
    "compressed in 8 bits": (compressed("pack-quantized", 8), lambda shape: packed(shape, 8, 0), 8),
    "compressed, int8": (compressed("int-quantized", 8), int_quantized, 8),
    "compressed, fp8 of rows": (
        compressed("float-quantized", 8),
        lambda shape: float_quantized(shape, (shape[0], 1)),
        None,
    ),
    "compressed, fp8": (compressed("float-quantized", 8), lambda shape: float_quantized(shape, (1,)), None),
    "compressed, fp8 of blocks": (
        compressed("float-quantized", 8),
        lambda shape: float_quantized(shape, (shape[0] // 32, shape[1] // 32)),
        None,
    ),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4, None),
    "nf4, scales plain": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        lambda shape: nf4(shape, nested=False),
        None,
    ),
    "int8 of bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        int8_of_bitsandbytes,
        None,
    ),
}
PROJECTION = r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight"


def write(path, stated, writer, model=None):
    """A checkpoint whose projections are in few bits, and its twin in transformers."""
    torch.manual_seed(1)
    model = model or hf_model("qwen3")
    model.config.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    tensors = {}
    for name, parameter in model.state_dict().items():
        if not re.fullmatch(PROJECTION, name):
            tensors[name] = parameter
            continue
        parts, weight = writer(tuple(parameter.shape))
        parameter.copy_(weight)
        tensors |= {name.removesuffix("weight") + end: part.contiguous() for end, part in parts.items()}
    save_file(tensors, path / "model.safetensors")
    return model


def check_equal(model, path, dtype="float32", **settings):
    """The same tokens as transformers, and log-probabilities of a prompt but for rounding."""
    prompts = random_prompts([3, 17, 40])
    params = SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=0)
    with LLM(str(path), num_kv_blocks=40, dtype=dtype, **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        layers = [getattr(module, "form", None) for module in llm.llm_engine.runner.model.modules()]
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        theirs = logits[range(len(prompt) - 1), prompt[1:]]
        ours = [
            entry[token_id].logprob
            for entry, token_id in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        ]
        tolerance = 2e-4 if dtype == "float32" else 0.4
        assert torch.tensor(ours) == pytest.approx(theirs, abs=tolerance)
        if dtype == "float32":
            assert output.outputs[0].token_ids == greedy(model, prompt, 12)
    return {form.bits for form in layers if form is not None} - {0}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_checkpoint_in_few_bits_computes_with_what_they_stand_for(name, tmp_path, capfd):
    stated, writer, bits = WRITTEN[name]
    model = write(tmp_path, stated, writer)
    assert check_equal(model, tmp_path) == ({bits} if bits else set())
    told = f"{bits} bits on cpu" if bits else "dequantised on cpu"
    assert told in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"model_impl": "transformers"}, {"enforce_eager": True}, {"dtype": "bfloat16"}]
)
@pytest.mark.parametrize("name", WRITTEN)
def test_so_does_transformers_code_one_without_kernels_and_one_of_16_bits(name, settings, tmp_path):
    stated, writer, bits = WRITTEN[name]
    kept = check_equal(write(tmp_path, stated, writer), tmp_path, **settings)
    if "enforce_eager" in settings:
        assert not kept
    elif "dtype" in settings:
        assert kept == ({bits or 8} if bits or "bitsandbytes" in name else set())
    else:
        assert kept == ({bits} if bits else set())
