"""Quantized checkpoints: each format's layout, written from its definition or by its own tools, and adapters.

The oracle is transformers with the weights that the integers stand for.
"""

import gc
import json
import re
from copy import deepcopy
from functools import partial

import gguf
import numpy as np
import peft
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer

from nanoengine import LLM, SamplingParams
from nanoengine.backends.cpu.cpu_device import CPU
from nanoengine.backends.cpu.kernels import Kernels
from nanoengine.checkpoints.gguf import READERS
from nanoengine.checkpoints.lora import PREFIX
from nanoengine.checkpoints.quantized_formats import QuantizedFiles
from tests import helpers
from tests.helpers import TINY, ask, change_tensors, edit_config, hf_model, open_checkpoint, refuse, slow

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=0)


def pack_rows(numbers, bits, order=range(8)):
    """Return numbers (R, C) of at least 0, with 32 / bits of them in each word. The last word is padded."""
    in_word = 32 // bits
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % in_word))
    words = np.zeros((numbers.shape[0], numbers.shape[1] // in_word), dtype=np.uint32)
    for i in range(in_word):
        words |= numbers[:, order[i] if in_word == 8 else i :: in_word].numpy().astype(np.uint32) << bits * i
    return torch.from_numpy(words.view(np.int32))


def random_parts(shape, bits, group):
    """Return numbers of at least 0 (N, I), and zeros and scales (N, G)."""
    numbers = torch.randint(0, 1 << bits, shape)
    zeros = torch.randint(1, 1 << bits, (shape[0], -(-shape[1] // group)))
    scales = ((torch.rand(zeros.shape) + 0.5) * 1.2 / (1 << bits)).half()
    return numbers, zeros, scales


def stands_for(numbers, zeros, scales, group):
    groups = torch.arange(numbers.shape[1]) // group
    return (numbers - zeros[:, groups]).double() * scales[:, groups].double()


def gptq(shape, bits=4, group=32, version="gptq", order=None, has_groups=True):
    numbers, zeros, scales = random_parts(shape, bits, group)
    groups = torch.arange(shape[1]) // group
    weight = stands_for(numbers, zeros, scales, group)
    if order is not None:  # inputs of a group lie anywhere
        places = order(shape[1])
        groups, weight, numbers = groups[places], weight[:, places], numbers[:, places]
    parts = {"qweight": pack_rows(numbers, bits).T, "scales": scales.T}
    parts["qzeros"] = pack_rows(zeros.T - int(version == "gptq"), bits)
    return {**parts, "g_idx": groups.int()} if has_groups else parts, weight


def awq(shape, group=32):
    numbers, zeros, scales = random_parts(shape, 4, group)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    parts = {"qweight": pack_rows(numbers.T, 4, order), "qzeros": pack_rows(zeros.T, 4, order)}
    return {**parts, "scales": scales.T}, stands_for(numbers, zeros, scales, group)


def packed(shape, bits=4, group=32, symmetric=True):
    group = group or shape[1]
    numbers, zeros, scales = random_parts(shape, bits, group)
    if symmetric:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    parts = {"weight_packed": pack_rows(numbers, bits), "weight_scale": scales}
    parts["weight_shape"] = torch.tensor(shape)
    if not symmetric:
        parts["weight_zero_point"] = pack_rows(zeros.T, bits).T
    return parts, stands_for(numbers, zeros, scales, group)


def packed_whole(shape, bits=4, symmetric=True):
    """Return one scale, and perhaps one zero, which is not a packed word."""
    numbers, scale = torch.randint(0, 1 << bits, shape), torch.rand(1) * 0.6 / (1 << bits) + 0.01
    zero = torch.tensor([0 if symmetric else 3], dtype=torch.int8)
    parts = {"weight_packed": pack_rows(numbers, bits), "weight_scale": scale}
    parts |= {"weight_shape": torch.tensor(shape)} | ({} if symmetric else {"weight_zero_point": zero})
    return parts, (numbers - (1 << (bits - 1)) - zero.long()).double() * scale.double()


def int_quantized(shape, group=None):
    numbers, _, scales = random_parts(shape, 8, group or shape[1])
    integers = (numbers - 128).to(torch.int8)
    parts = {"weight": integers, "weight_scale": scales, "input_scale": torch.ones(1)}
    return parts, stands_for(integers, torch.zeros_like(scales), scales, group or shape[1])


def float_quantized(shape, block=None, scale_name="weight_scale"):
    """Return a scale per block (None: one for all). The last block of a row or column may be smaller."""
    rows, columns = (min(n or size, size) for n, size in zip(block or (None, None), shape, strict=True))
    weight = (torch.randn(shape) * 2).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // rows), -(-shape[1] // columns)) * 0.2
    wide = scales[torch.arange(shape[0]) // rows][:, torch.arange(shape[1]) // columns]
    saved = scales if block else scales.flatten()
    return {"weight": weight, scale_name: saved}, weight.double() * wide.double()


def nf4(shape, nested=True, block=64, stored=torch.uint8):
    table = torch.tensor([-1.0, *sorted((torch.rand(14) * 2 - 1).tolist()), 1.0])
    numbers = torch.randint(0, 16, (shape[0] * shape[1],))
    blocks = -(-numbers.numel() // block)
    padded = torch.nn.functional.pad(numbers, (0, numbers.numel() % 2))
    bytes_of_pairs = (padded[::2] << 4 | padded[1::2]).to(torch.uint8).unsqueeze(1)
    parts = {"weight": bytes_of_pairs.view(-1).view(stored).unsqueeze(1), "weight.quant_map": table}
    state = {"blocksize": block, "shape": list(shape), "quant_type": "nf4", "dtype": "float32"}
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
    return parts, (table[numbers] * scales.repeat_interleave(block)[: len(numbers)]).view(shape).double()


def int8_of_bitsandbytes(shape):
    integers, scales = torch.randint(-127, 128, shape, dtype=torch.int8), torch.rand(shape[0]) * 0.6
    return {"weight": integers, "SCB": scales}, integers.double() * (scales.double() / 127).unsqueeze(1)


def compressed(form, bits, weights=None, **fields):
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int", **(weights or {})}}
    stated = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return stated | fields


def in_groups(size):
    return {"strategy": "group", "group_size": size}


def but(writer, excepted, other=None):
    """Return a writer that writes weights of one shape in another way, or as floats."""
    return lambda shape: writer(shape) if shape != excepted else other and other(shape)


def scattered(num_inputs):
    return torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_inputs))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
AUTO_ROUND |= {"packing_format": "auto_round:auto_gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
PACKED, FLOAT8 = compressed("pack-quantized", 4), compressed("float-quantized", 8)
MIXED = compressed("pack-quantized", 4)
MIXED["config_groups"] |= {"group_1": compressed("pack-quantized", 8)["config_groups"]["group_0"]}
WHOLE = compressed("pack-quantized", 8, {"strategy": "tensor"})
INTS = compressed("int-quantized", 8), partial(int_quantized, group=32)
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
STATIC, STORAGE = {"quant_method": "fp8", "activation_scheme": "static"}, "bnb_4bit_quant_storage"
write_fp8 = partial(float_quantized, scale_name="weight_scale_inv")
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
without_groups, SMALLER = partial(gptq, has_groups=False), partial(gptq, bits=8, group=16, has_groups=False)
IN_8_BITS = {r"+:.*\.down_proj": {"bits": 8, "group_size": 16}}
IN_16_BITS = {"model.layers.0.mlp.down_proj": {"bits": 16}}
# The config's settings, a function that writes a weight, and the bits of the CPU's layers; None: floats
CHECKPOINTS = {
    "gptq": (GPTQ, gptq, 4),
    "gptq, second version": ({**GPTQ, "checkpoint_format": "gptq_v2"}, partial(gptq, version="gptq_v2"), 4),
    "gptq, no g_idx": ({**GPTQ, "group_size": 64}, partial(gptq, group=64, has_groups=False), 4),
    "gptq in 8 bits": ({**GPTQ, "bits": 8}, partial(gptq, bits=8), 8),
    "gptq, one group": ({**GPTQ, "group_size": -1}, lambda shape: gptq(shape, group=shape[1]), 4),
    "gptq, inputs in another order": ({**GPTQ, "desc_act": True}, partial(gptq, order=scattered), None),
    "gptq, some layers not": ({**GPTQ, "dynamic": {r"-:.*\.down_proj": {}}}, but(gptq, (64, 96)), 4),
    "gptq, some in 8 bits": ({**GPTQ, "dynamic": IN_8_BITS}, but(without_groups, (64, 96), SMALLER), (4, 8)),
    "gptq_marlin": ({**GPTQ, "quant_method": "gptq_marlin"}, gptq, 4),
    "auto-round": (AUTO_ROUND, without_groups, 4),
    "auto-round, some not": ({**AUTO_ROUND, "extra_config": IN_16_BITS}, but(without_groups, (64, 96)), 4),
    "auto-round as awq": ({**AUTO_ROUND, "packing_format": "auto_round:auto_awq"}, awq, 4),
    "awq": (AWQ, awq, 4),
    "compressed": (PACKED, packed, 4),
    "compressed, zeros": (PACKED, partial(packed, symmetric=False), 4),
    "compressed, 4 and 8 bits": (MIXED, but(packed, (64, 96), partial(packed, bits=8)), (4, 8)),
    "compressed in 8 bits": (compressed("pack-quantized", 8), partial(packed, bits=8, group=0), 8),
    "compressed, one scale and zero": (WHOLE, partial(packed_whole, bits=8, symmetric=False), None),
    "compressed, int8": (compressed("int-quantized", 8), int_quantized, 8),
    "compressed, fp8 of rows": (FLOAT8, partial(float_quantized, block=(1, None)), None),
    "compressed, fp8": (FLOAT8, float_quantized, None),
    "compressed, fp8 of blocks": (FLOAT8, partial(float_quantized, block=(32, 32)), None),
    "fp8": (FP8, partial(write_fp8, block=(32, 32)), None),
    "fp8 of the whole": ({**FP8, "weight_block_size": None}, write_fp8, None),
    "fp8 with weight_scale": ({**FP8, "weight_block_size": None}, float_quantized, None),
    "fp8 with a weight_scale per row": (STATIC, partial(float_quantized, block=(1, None)), None),
    "fp8 of ModelOpt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, float_quantized, None),
    "nf4": (NF4, nf4, None),
    "nf4, stored as bfloat16": (NF4 | {STORAGE: "bfloat16"}, partial(nf4, stored=torch.bfloat16), None),
    "nf4, stored as float32": (NF4 | {STORAGE: "float32"}, partial(nf4, stored=torch.float32), None),
    "nf4, scales plain": (NF4, partial(nf4, nested=False), None),
    "int8 of bitsandbytes": (INT8, int8_of_bitsandbytes, None),
}
PROJECTION = r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight"


def write(path, stated, writer, model=None, pattern=PROJECTION):
    """Write a checkpoint whose projections are quantized. Return its transformers twin."""
    torch.manual_seed(1)
    model = model or hf_model("qwen3")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    edit_config(path, quantization_config=stated)
    tensors = {}
    for name, parameter in model.state_dict().items():
        written = writer(tuple(parameter.shape)) if re.fullmatch(pattern, name) else None
        if written is None:
            tensors[name] = parameter
        else:
            parts, weight = written
            parameter.copy_(weight)
            tensors |= {name.removesuffix("weight") + end: part.contiguous() for end, part in parts.items()}
    save_file(tensors, path / "model.safetensors")
    return model


def check_equal(model, path, dtype="float32", **settings):
    """Compare tokens and a prompt's logprobs with transformers'. Return the bits of the quantized layers."""
    prompts = helpers.random_prompts([3, 17, 40])
    with LLM(str(path), num_kv_blocks=40, dtype=dtype, **settings) as llm:
        outputs = ask(llm, prompts, max_tokens=4, prompt_logprobs=0)
        layers = [getattr(module, "form", None) for module in llm.llm_engine.runner.model.modules()]
    for prompt, output in zip(prompts, outputs, strict=True):
        theirs = helpers.logprobs_of(model, prompt + (tokens := output.outputs[0].token_ids)[:-1])
        tolerance = 2e-4 if dtype == "float32" else 0.4
        expected, ours = theirs[range(len(prompt) - 1), prompt[1:]], helpers.prompt_logprobs(output)
        assert torch.tensor(ours) == pytest.approx(expected, abs=tolerance, rel=1e-4)
        if dtype == "float32":
            assert tokens == theirs[-4:].argmax(-1).tolist()
    return {form.bits for form in layers if form is not None} - {0}


SETTINGS: list[dict] = [{"model_impl": "transformers"}, {"enforce_eager": True}]
SETTINGS += [{"dtype": "bfloat16", "activations": "float"}]


@pytest.mark.parametrize("settings", [{}, *slow(*SETTINGS)])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_quantized_checkpoint_computes_with_its_dequantized_weights(name, settings, tmp_path, caplog):
    stated, writer, bits = CHECKPOINTS[name]
    model = write(tmp_path, stated, writer)
    if "enforce_eager" in settings:
        bits = None
    elif "dtype" in settings and ("bitsandbytes" in name or "one scale" in name):
        bits = 8
    all_bits = {bits} - {None} if not isinstance(bits, tuple) else {*bits}
    assert check_equal(model, tmp_path, **settings) == all_bits
    in_words = " and ".join(map(str, sorted(all_bits)))
    assert (f"weights in {in_words} bits on cpu" if bits else "dequantized, on cpu") in caplog.text


def test_modelopt_may_state_fp8_in_a_file_of_its_own(tmp_path):
    model = write(tmp_path, None, float_quantized)
    stated = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(stated))
    names = (f"model.layers.0.self_attn.{name}" for name in ("k_scale", "q_proj.input_scale"))
    change_tensors(tmp_path, lambda tensors: tensors.update({name: torch.ones(()) for name in names}))
    check_equal(model, tmp_path)


@pytest.mark.parametrize("name", ["gptq", *slow("awq", "fp8", "nf4")])
def test_the_config_of_a_language_model_may_state_its_format(name, tmp_path):
    model = write(tmp_path, *CHECKPOINTS[name][:2], hf_model("llama without gqa"))
    config, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    whole = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    config.write_text(json.dumps({**whole, "text_config": json.loads(config.read_text())}))
    save_file({f"language_model.{name}": x for name, x in load_file(file).items()}, file)
    check_equal(model, tmp_path)


@pytest.mark.parametrize("packs", [False, True])
def test_quantized_weights_are_read_once_on_transformers_code(packs, tmp_path, monkeypatch):
    """Before one is packed, it takes no memory."""
    model = write(tmp_path, *CHECKPOINTS["gptq"][:2])
    names, stored, read, pack = [], [], QuantizedFiles.read, CPU.pack

    def linear_layers():
        return [x for x in gc.get_objects() if type(x) is nn.Linear and not x.weight.is_meta]

    known = linear_layers()  # of `model`, and of models that other tests keep

    def spy(*args):
        if not stored:  # before the first is packed
            layers = [x for x in linear_layers() if not any(x is one for one in known)]
            stored.extend((len(layers), sum(layer.weight.untyped_storage().nbytes() for layer in layers)))
        return pack(*args)

    monkeypatch.setattr(CPU, "pack", spy if packs else None)
    monkeypatch.setattr(QuantizedFiles, "read", lambda self, name: names.append(name) or read(self, name))
    assert check_equal(model, tmp_path, model_impl="transformers") == ({4} if packs else set())
    assert len(names) == len(set(names)) > 14
    if packs:
        num_layers, num_bytes = stored
        assert num_layers == 15
        assert num_bytes < 2 * model.lm_head.weight.nbytes  # the head is not quantized


def test_a_quantized_weight_of_another_shape_is_refused_on_transformers_code(tmp_path):
    write(tmp_path, *CHECKPOINTS["awq"][:2])
    edit_config(tmp_path, intermediate_size=64)
    words = r"(gate|up|down)_proj.weight' has shape .*, the config requires"
    refuse(tmp_path, words, model_impl="transformers")


@pytest.mark.parametrize(("size", "ranks"), [(64, 1), (48, 1), *slow((48, 2))])
@pytest.mark.parametrize(("stated", "writer"), [(GPTQ, without_groups), (AWQ, awq), (PACKED, packed), INTS])
def test_group_size_that_does_not_fit_the_file_is_refused(stated, writer, size, ranks, tmp_path):
    stated = json.loads(json.dumps(stated))
    for group in stated.get("config_groups", {}).values():
        group["weights"] |= in_groups(size)
    write(tmp_path, {**stated, "group_size": size}, writer)
    message = rf"is invalid: scales of shape .* do not fit .* 1 x {size}$"
    refuse(tmp_path, message, tensor_parallel_size=ranks)


# ---- Files that are not sound --------------------------------------------------------------------


UP = "model.layers.1.mlp.up_proj"
INVALID = f"tensor '{UP}.weight', gptq, is invalid: "
UNSOUND = {  # part -> its new value, given all parts
    "missing": ("scales", lambda t: None, f"lacks tensor '{UP}.scales', which '{UP}.qweight'"),
    "another type": ("qzeros", lambda t: t("qzeros").float(), f"'{UP}.qzeros' as F32; in gptq it must be"),
    "transposed": ("scales", lambda t: t("scales").T, f"{INVALID}scales of shape"),
    "other zeros": ("qzeros", lambda t: t("qzeros")[:, :-4], f"{INVALID}scales of shape"),
    "another shape": ("qweight", lambda t: t("qweight")[:-4], f"{INVALID}g_idx does not name"),
    "no such group": ("g_idx", lambda t: t("g_idx") + 1, f"{INVALID}g_idx does not name"),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_weight_whose_parts_do_not_fit_is_refused_by_name(name, tmp_path):
    part, edit, message = UNSOUND[name]
    write(tmp_path, GPTQ, gptq)
    change_tensors(tmp_path, lambda t: t.update({f"{UP}.{part}": edit(lambda part: t[f"{UP}.{part}"])}))
    refuse(tmp_path, message)


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_state_that_does_not_fit_its_weight_is_refused(nested, tmp_path):
    write(tmp_path, NF4, lambda shape: nf4(shape, nested))
    name = f"{UP}.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(load_file(tmp_path / "model.safetensors")[name].tolist()))
    few = "is invalid: 96 scales do not fit 6144"
    for change_to, message in (
        *(({"blocksize": block}, few) for block in (128, 32, 0, -64, 10**12, "64")),
        ({"shape": [96, 60]}, "is invalid: 3072 bytes do not make a weight of shape"),
        ({"shape": [64, 96]}, r"has shape \(64, 96\), the config requires \(96, 64\)"),
        ({"shape": None}, "is invalid"),
        *([({"nested_blocksize": 64}, "is invalid: 1 scales do not fit 96 numbers")] if nested else []),
    ):
        text = torch.tensor(list(json.dumps({**state, **change_to}).encode()), dtype=torch.uint8)
        change_tensors(tmp_path, lambda t, text=text: t.update({name: text}))
        refuse(tmp_path, f"tensor '{UP}.weight'.* {message}")
    change_tensors(tmp_path, lambda t: t.update({name: t[name][:-3]}))
    refuse(tmp_path, f"tensor '{UP}.weight', bitsandbytes, is invalid")
    if nested:
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        change_tensors(tmp_path, lambda t: t.update({name: text, f"{UP}.weight.nested_absmax": None}))
        refuse(tmp_path, "is invalid: absmax is torch.uint8; uint8 needs nested_absmax")


@pytest.mark.parametrize("impl", ["nanoengine", "transformers"])
def test_bitsandbytes_int8_in_another_order_than_rows_is_refused(impl, tmp_path):
    write(tmp_path, *CHECKPOINTS["int8 of bitsandbytes"][:2])
    rows, columns = ({f"{UP}.weight_format": torch.tensor(n, dtype=torch.uint8)} for n in (0, 2))
    change_tensors(tmp_path, lambda t: t.update(rows))
    LLM(str(tmp_path), num_kv_blocks=4, model_impl=impl).close()
    change_tensors(tmp_path, lambda t: t.update(columns))
    refuse(tmp_path, f"tensor '{UP}.weight', bitsandbytes, is invalid: weight_format is 2", model_impl=impl)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({**GPTQ, "group_size": 0}, "its group_size is 0"),
        ({**GPTQ, "bits": 3}, "with gptq, and its bits is 3; supported: 4, 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "its checkpoint_format is 'marlin'"),
        ({**GPTQ, "dynamic": {"a": {"bits": 3}}}, "its bits is 3; supported: 4, 8"),
        ({**GPTQ, "dynamic": ["a"]}, r"its dynamic is \['a'\]; it must map names to settings"),
        ({**AUTO_ROUND, "packing_format": "llm"}, "its packing_format is 'llm'; supported"),
        ({**AUTO_ROUND, "extra_config": {"a": {"bits": 2}}}, "its bits is 2; supported: 4, 8"),
        (compressed("mixed-precision", 4), r"its groups have the formats|its format is None"),
        ({**AWQ, "version": "gemv"}, "with awq, and its version is 'gemv'"),
        (compressed("pack-quantized", 4, in_groups(None)), "its strategy 'group' with group_size None"),
        (compressed("pack-quantized", 4, {"strategy": "tensor_group"}), "its strategy 'tensor_group' with"),
        (compressed("float-quantized", 8, {"strategy": "block"}), "its block_structure is None"),
        (compressed("nvfp4-pack-quantized", 4), "its format is 'nvfp4-pack-quantized'"),
        (compressed("pack-quantized", 3), r"its weights' num_bits are \{3\}; supported: \{.*4.*\}"),
        ({**PACKED, "sparsity_config": {"format": "sparse-24"}}, "it has a sparsity_config, which"),
        ({**FP8, "weight_block_size": [0, 32]}, r"with fp8, and its weight_block_size is \[0, 32\]"),
        ({**FP8, "weight_block_size": [128]}, r"with fp8, and its weight_block_size is \[128\]"),
        ({**NF4, "bnb_4bit_quant_type": ["nf4"]}, r"bnb_4bit_quant_type is \['nf4'\]"),
    ],
)
def test_unsupported_setting_of_a_format_is_named(stated, message, tmp_path):
    write(tmp_path, stated, gptq)
    refuse(tmp_path, message)


def test_quantization_setting_must_match_a_quantized_checkpoint(tmp_path):
    write(tmp_path, *CHECKPOINTS["awq"][:2])
    for name in ("int8", "gptq"):
        refuse(tmp_path, f"quantization='{name}' does not match .* whose weights are awq", quantization=name)
    LLM(str(tmp_path), num_kv_blocks=4, quantization="awq").close()


# ---- GGUF ----------------------------------------------------------------------------------------

KINDS = [*READERS, "F16", "BF16", "F32", "Q3_K"]
NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 8)  # Llama's and Qwen2's are the same


def gguf_name(name):
    place, _, end = name.rpartition(".")
    return f"{NAMES.get_name(place)}.{end}"


# Where a block has its float16 scales, of the types that gguf reads and cannot write
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
HALVES |= dict.fromkeys(("IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S"), (0,))


def raw_blocks(weight, kind):
    """Return a weight's bytes in a type, and their values. They are random if gguf cannot write the type."""
    quant = gguf.GGMLQuantizationType[kind]
    try:
        data = gguf.quants.quantize(weight.float().numpy(), quant)
    except NotImplementedError:
        block, num_bytes = gguf.GGML_QUANT_SIZES[quant]
        blocks = torch.randint(0, 256, (len(weight), weight.shape[1] // block, num_bytes), dtype=torch.uint8)
        data, rng = blocks.numpy(), np.random.default_rng(0)
        sizes = [rng.random((*data.shape[:2], 1)) for _ in HALVES[kind]]
        factor = 1.0
        for _ in range(2):  # the second time with scales for weights of 0.1
            for place, size in zip(HALVES[kind], sizes, strict=True):
                size[1] = 0 if place == 0 else size[1] / 100  # of one row none at all
                data[..., place : place + 2] = (size * factor).astype(np.float16).view(np.uint8)
            factor = 0.1 / gguf.quants.dequantize(data.reshape(len(weight), -1), quant).std()
        data = data.reshape(len(weight), -1)
    return data, torch.from_numpy(gguf.quants.dequantize(data, quant))


def add_fields(writer, fields):
    """Add fields to a header, with the types of their values."""
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    adders |= {str: writer.add_string, list: writer.add_array}
    for name, value in fields.items():
        adders[type(value)](name, value)


def gguf_writer(path, family, **fields):
    """Start a file with these fields of its family. Two underscores in a name become a dot."""
    writer = gguf.GGUFWriter(path, family)
    add_fields(writer, {f"{family}.{name.replace('__', '.')}": value for name, value in fields.items()})
    return writer


def close(writer, path):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_gguf(path, model, kind, family, tied=False, tokenizer=None, **fields):
    """Write a model as llama.cpp's converter does. Its weights become what the file's blocks stand for."""
    config = model.config
    sizes = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention__head_count": config.num_attention_heads,
        "attention__head_count_kv": config.num_key_value_heads,
    }
    if getattr(config, "head_dim", None):
        sizes |= dict.fromkeys(("attention__key_length", "attention__value_length"), config.head_dim)
    numbers = {"rope__freq_base": 10000.0, "attention__layer_norm_rms_epsilon": config.rms_norm_eps}
    writer = gguf_writer(path, family, **sizes | numbers | fields)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        num_heads = heads.get(name.split(".")[-2]) if family == "llama" else None
        weight = in_pairs(parameter, num_heads)
        if parameter.dim() == 1:
            writer.add_tensor(gguf_name(name), weight.numpy())
            continue
        chosen = kind if isinstance(kind, str) else kind(name)
        data, value = raw_blocks(weight, chosen)
        parameter.copy_(in_pairs(value, num_heads, back=True))
        writer.add_tensor(gguf_name(name), data, raw_dtype=gguf.GGMLQuantizationType[chosen])
    close(writer, path)
    return model


MERGES = ["Ġ t", "h e", "Ġt he"]


def merging_tokenizer(end="<|im_end|>"):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(merge.replace(" ", "") for merge in MERGES)]
    merges = [tuple(merge.split()) for merge in MERGES]
    model = tokenizers.models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", end])
    settings = {"eos_token": end, "chat_template": AutoTokenizer.from_pretrained(helpers.DEMO).chat_template}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def add_tokenizer(writer, tokenizer):
    """Add a byte-level BPE, as the converter writes GPT-2's."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    size = len(tokenizer)
    writer.add_token_list([tokenizer.convert_ids_to_tokens(i) for i in range(size)])
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    writer.add_token_types([3 if i in special else 1 for i in range(size)])
    writer.add_token_merges(MERGES)
    if tokenizer.eos_token is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def in_pairs(weight, num_heads, back=False):
    """Permute rows as llama.cpp does: the halves of a head become pairs of neighbors, or back."""
    if num_heads is None:
        return weight
    parts = (num_heads, -1, 2) if back else (num_heads, 2, -1)
    return weight.unflatten(0, parts).transpose(1, 2).reshape(weight.shape)


def gguf_of(path, name, kind, family, **settings):
    """Return a file of a tiny model whose inputs are multiples of 256 where a type's blocks are."""
    sizes = {"head_dim": 32} if family == "qwen3" else {}
    if isinstance(kind, str) and kind.endswith("_K"):
        sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "initializer_range": 0.1}
    torch.manual_seed(2)
    sizes = {**TINY, **sizes, "tie_word_embeddings": settings.get("tied", False)}
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return write_gguf(path, model, kind, family, **settings)


@pytest.mark.parametrize("dtype", ["float32", *slow("bfloat16")])
@pytest.mark.parametrize("kind", KINDS)
def test_gguf_file_of_every_type_computes_with_its_dequantized_weights(kind, dtype, tmp_path):
    model = gguf_of(tmp_path / "model.gguf", "Qwen3", kind, "qwen3")
    kept = {"Q4_0": {4}, "Q5_0": {8}, "Q8_0": {8}}.get(kind, set())  # float16 scales are exact for these
    if dtype == "bfloat16" and kind in READERS:
        fewer = 6 if Kernels(torch.bfloat16).are_integers_fast else 8  # products of floats take 8
        kept = {4 if kind.startswith("Q4") else 8 if kind == "Q8_0" else fewer}
    assert check_equal(model, tmp_path / "model.gguf", dtype) == kept


@pytest.mark.parametrize(("name", "family", "tied"), [("Llama", "llama", False), ("Qwen2", "qwen2", True)])
def test_gguf_files_of_other_families(name, family, tied, tmp_path):
    model = gguf_of(tmp_path / "model.gguf", name, "Q8_0", family, tied=tied)
    assert check_equal(model, tmp_path / "model.gguf") == {8}
    with LLM(str(tmp_path), gguf_file="model.gguf", num_kv_blocks=8) as llm:
        model = llm.llm_engine.runner.model
        assert (model.embed_tokens.head[0] is model.lm_head) == tied


def test_gguf_file_has_its_own_tokenizer_chat_template_and_eos(tmp_path):
    tokenizer = merging_tokenizer()
    config = transformers.Qwen3Config(**{**TINY, "head_dim": 32, "vocab_size": len(tokenizer)})
    model = transformers.Qwen3ForCausalLM(config).eval()
    write_gguf(tmp_path / "model.gguf", model, "Q8_0", "qwen3", tokenizer=tokenizer)
    with LLM(str(tmp_path / "model.gguf"), num_kv_blocks=40, dtype="float32") as llm:
        ours = llm.get_tokenizer()
        for text in ("What is 27 + 58?", "Crème brûlée\n\t<|im_end|>", " the  the"):
            assert ours(text).input_ids == tokenizer(text).input_ids
            assert ours.decode(ours(text).input_ids) == text
        assert ours.chat_template == tokenizer.chat_template
        assert llm.llm_engine.checkpoint.eos_token_ids == (tokenizer.eos_token_id,)
        output = llm.chat([{"role": "user", "content": "Hello"}], GREEDY, use_tqdm=False)[0]
        regex = "the the [0-9]{3}"
        assert re.fullmatch(regex, ask(llm, "a", structured_outputs={"regex": regex})[0].outputs[0].text)
    said = output.outputs[0].token_ids
    assert said == helpers.greedy(model, output.prompt_token_ids, 12)[: len(said)]
    whole = ours.decode(said, skip_special_tokens=True)
    assert output.outputs[0].text.rstrip("\ufffd") == whole.rstrip("\ufffd")  # half a character is no text


@pytest.mark.parametrize("family", ["llama", "gemma2", "stablelm"])
def test_a_gguf_file_ends_only_at_tokens_that_it_names_or_hf_overrides_states(family, tmp_path):
    path = tmp_path / "model.gguf"
    assert transformers.AutoConfig.for_model(family).eos_token_id is not None
    for end, ends in (("<|im_end|>", (260,)), ("<|im_other|>", ())):
        tokenizer = merging_tokenizer(end)
        tokenizer.eos_token = None
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TINY, "vocab_size": 261}))
        epsilon = {"attention__layer_norm_epsilon": 1e-5}
        write_gguf(path, model, "F32", family, tied=True, tokenizer=tokenizer, **epsilon)
        assert open_checkpoint(str(path)).eos_token_ids == ends
        assert open_checkpoint(str(path), hf_overrides={"use_cache": False}).eos_token_ids == ends
        assert open_checkpoint(str(path), hf_overrides={"eos_token_id": [5, 7]}).eos_token_ids == (5, 7)


def test_malformed_gguf_file_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    gguf_of(path, "Qwen3", "Q4_0", "qwen3")
    whole = path.read_bytes()
    for length in (3, 100, len(whole) // 3, len(whole) - 1000):
        path.write_bytes(whole[:length])
        refuse(path, "model.gguf cannot be loaded: (it ends at|tensor .* ends at|it starts with)")
    path.write_bytes(whole.replace(b"qwen3.block_count", b"qwen3.block_cQunt"))
    refuse(path, "its qwen3.block_count must be an integer from 1 to .*, got None")
    path.write_bytes(whole.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_Up.weight"))
    refuse(path, r"lacks 1 tensors, the first is 'model.layers.1.mlp.up_proj.weight'")
    path.write_bytes(whole.replace(b"qwen3", b"qwen0"))
    refuse(path, "model.gguf cannot be loaded: its architecture 'qwen0' is not supported; supported: ")
    (tmp_path / "model.bin").write_bytes(whole)
    refuse(tmp_path / "model.bin", "must be a directory, a hub id or a .gguf file")
    refuse(tmp_path, r"gguf_file must be a \.gguf file in", gguf_file="other.gguf")


# ---- Adapters ------------------------------------------------------------------------------------

BIASED, TIED = "qwen3 with attention bias", "qwen2 tied"


def lora(base, *targets, **settings):
    """Return a base model, and PEFT's settings for an adapter of these layers."""
    return base, {"target_modules": [*targets], **settings}


PATTERNS = {"rank_pattern": {"layers.1.mlp.down_proj": 2, "q_proj": 6}, "alpha_pattern": {"down_proj": 3}}
# Beside those of test_random_formats.py
ADAPTERS: dict[str, tuple[str, dict]] = {
    "attention": lora(BIASED, "q_proj", "v_proj", r=4, lora_alpha=12),
    "ranks of their own": lora(BIASED, "q_proj", "down_proj", **PATTERNS),
    "both for others": lora(TIED, "q_proj", modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "lora of both, tied": lora(TIED, "embed_tokens", "lm_head", ensure_weight_tying=True),
    "dora of both": lora(TIED, "embed_tokens", "lm_head", "down_proj", use_dora=True),
}


def adapter_of(model, path, settings, is_merged=True):
    """Save a random adapter with PEFT. Return PEFT's merged model, or its unmerged one."""
    torch.manual_seed(3)
    tuned = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    tuned.save_pretrained(path)
    return tuned.merge_and_unload() if is_merged else tuned.eval()


def saved_base(name, path):
    """Save a model in the folder `base`, and return it. PEFT needs its architecture in the config."""
    model = hf_model(name)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(path / "base")
    return model


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, about tied weights
@pytest.mark.parametrize("impl", ["nanoengine", "transformers"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter_leaves_the_other_name_of_a_tied_weight_as_peft_does(name, impl, tmp_path, caplog):
    """The oracle is PEFT's forward pass: its merged model would change both names of a tied weight."""
    base, settings = ADAPTERS[name]
    model = saved_base(base, tmp_path)
    tuned = adapter_of(model, tmp_path / "adapter", {"r": 4, **settings}, is_merged=False)
    assert not check_equal(tuned, tmp_path / "base", lora=tmp_path / "adapter", model_impl=impl)
    assert "and the adapter adapter on cpu" in caplog.text


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("impl", ["nanoengine", "transformers"])
def test_an_adapter_of_a_multimodal_model_changes_its_language_model(impl, old, tmp_path):
    """The vision tower has layers with the same names. The pattern has the name of a layer of the whole."""
    torch.manual_seed(0)
    config = transformers.LlavaConfig(text_config={**TINY, "model_type": "llama"}, vision_config=VISION)
    config.image_token_index = 127
    model = transformers.LlavaForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "base")
    ranks = {"model.language_model.layers.1.self_attn.q_proj": 6}
    settings = {"target_modules": ["q_proj", "lm_head"], "r": 4, "rank_pattern": ranks}
    tuned = adapter_of(model, tmp_path / "adapter", settings, is_merged=False)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    assert any("vision_tower" in name for name in load_file(file))
    if old:  # as before transformers 4.52
        layers = "model.language_model.", "language_model.model."
        head = "model.lm_head", "model.language_model.lm_head"
        save_file({name.replace(*layers).replace(*head): x for name, x in load_file(file).items()}, file)
        config_path = tmp_path / "adapter" / "adapter_config.json"
        config_path.write_text(config_path.read_text().replace(*layers))
    check_equal(tuned, tmp_path / "base", lora=tmp_path / "adapter", model_impl=impl)
    save_file({name: x for name, x in load_file(file).items() if "vision_tower" in name}, file)
    words = "adapter_model.safetensors changes no weight of the language"
    refuse(tmp_path / "base", words, lora=tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("impl", ["nanoengine", "transformers"])
@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_base_weight_in_an_adapter_replaces_both_tied_names(target, impl, tmp_path):
    """PEFT copies the base weight of a further-trained base into the one weight that both names share."""
    model = saved_base("qwen2 tied", tmp_path)
    adapter_of(deepcopy(model), tmp_path / "adapter", {"r": 4, "target_modules": [target]})
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    (name,) = (name for name in tensors if "base_layer" in name)
    save_file(tensors | {name: tensors[name] + torch.randn_like(tensors[name]) * 0.1}, file)
    tuned = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    check_equal(tuned, tmp_path / "base", lora=tmp_path / "adapter", model_impl=impl)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head"]])
def test_adapter_unties_a_quantized_embedding(targets, tmp_path):
    path = tmp_path / "model.gguf"
    model = gguf_of(path, "Qwen2", "Q8_0", "qwen2", tied=True)
    tuned = adapter_of(model, tmp_path / "adapter", {"r": 4, "target_modules": targets}, is_merged=False)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any("base_layer" in name for name in tensors)
    check_equal(tuned, path, lora=tmp_path / "adapter")
    kept = {name: tensor for name, tensor in tensors.items() if "base_layer" not in name}
    save_file(kept, tmp_path / "adapter" / "adapter_model.safetensors")
    check_equal(tuned, path, lora=tmp_path / "adapter")


@pytest.mark.parametrize("impl", ["nanoengine", "transformers"])
def test_quantized_layers_that_an_adapter_changes_are_dequantized(impl, tmp_path):
    model = write(tmp_path / "base", *CHECKPOINTS["gptq"][:2])
    merged = adapter_of(model, tmp_path / "adapter", ADAPTERS["attention"][1])
    assert check_equal(merged, tmp_path / "base", lora=str(tmp_path / "adapter"), model_impl=impl) == {4}


def test_adapter_that_is_not_plain_or_does_not_fit_is_refused(tmp_path):
    model, path = saved_base("qwen3", tmp_path), tmp_path / "adapter"
    refuse_adapter = partial(refuse, tmp_path / "base", lora=path)
    refuse_adapter(r"lora must be the directory of a PEFT adapter: .* has no adapter_config.json")
    adapter_of(model, path, ADAPTERS["attention"][1])
    config_path, file = path / "adapter_config.json", path / "adapter_model.safetensors"
    config, tensors = json.loads(config_path.read_text()), load_file(file)
    first = next(name for name in tensors if name.endswith("0.self_attn.q_proj.lora_A.weight"))
    for change, words in (
        ({"use_dora": True}, "use_dora=True, but no magnitude vector for 'model.layers.0.self_attn"),
        ({"lora_bias": True}, "lora_bias must be one of .*, got True"),
        ({"peft_type": "LOHA"}, "peft_type must be one of .*, got 'LOHA'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights must be one of .*, got 'pissa'"),
        ({"r": 5}, "q_proj has rank 4, but the config has 5"),
        ({"lora_alpha": "x"}, "alpha 'x'"),
        ({"lora_alpha": float("inf")}, "alpha inf"),
        ({"rank_pattern": True}, "adapter cannot be loaded: AttributeError"),
        ({"alpha_pattern": {"(": 1}}, "adapter cannot be loaded: .*unterminated subpattern"),
    ):
        config_path.write_text(json.dumps({**config, **change}))
        refuse_adapter(words)
    config_path.write_text(json.dumps(config))
    matrix = tensors[first]
    for changed, words in (
        ({first: None}, "lacks lora_A or lora_B for 'model.layers.0.self_attn.q_proj.weight'"),
        ({first: matrix[:, :-1]}, "do not make 'model.layers.0.self_attn.q_proj.weight'"),
        ({first.replace("layers.0", "layers.7"): matrix}, "which is not a weight of the model"),
        ({first.replace("lora_A", "lora_magnitude_vector"): matrix}, "use_dora=False, but a magnitude"),
        ({first.replace("lora_A", "lora_C"): matrix}, "is not plain LoRA or DoRA"),
        ({f"{PREFIX}model.embed_tokens.weight": torch.zeros(130, 64)}, "not .*; resize the base's vocab"),
    ):
        kept = {name: x.clone() for name, x in {**tensors, **changed}.items() if x is not None}
        save_file(kept, file)
        refuse_adapter(words)
    file.write_bytes(b"no file")
    refuse_adapter("is damaged")
    refuse(tmp_path / "base", "lora needs tensor_parallel_size=1", lora=path, tensor_parallel_size=2)
