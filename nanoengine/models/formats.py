"""Checkpoints in few bits: GPTQ's, AWQ's, compressed-tensors' and bitsandbytes', without their packages.

Each writes a linear layer's weight as several tensors. They are read as a `Quantized` where they are integers
in groups of inputs, which a device may keep as they are, and as floats where they are anything else.

Sources: AutoGPTQ's and AutoAWQ's packing of `qweight`; compressed_tensors/compressors;
bitsandbytes/functional.py. Shape letters: N outputs, I inputs, G groups of them.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanoengine.backends.quantized import Quantized

Tensors = Mapping[str, Tensor]  # of one weight, by the ends of their names
FLOATS = ("F16", "BF16", "F32")
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where a word of 32 bits has each of eight neighbours


class Part(NamedTuple):
    """One of the tensors that a weight is written as."""

    end: str  # of its name
    dtypes: tuple[str, ...]  # by safetensors' names
    is_optional: bool = False


class Format(NamedTuple):
    """How a checkpoint's weights are written."""

    name: str  # for the user
    parts: tuple[Part, ...]  # the first tells a weight of this kind from a plain one
    # Its shape (N, I), by that of its first part; None: only its contents tell.
    shape: Callable[[tuple[int, ...]], tuple[int, ...] | None]
    # The weight, from its tensors. Raises an error of any kind where these do not fit each other.
    read: Callable[[Tensors], Quantized | Tensor]
    unused: tuple[str, ...] = ()  # tensors' ends that mean nothing here: scales of activations


def choose_format(stated: dict[str, Any]) -> Format | None:
    """How the weights are written that a config says this of, its `quantization_config`; None: not so.

    Raises:
        ValueError: by one of these, in a way that is not served; with the reason.
    """
    maker = FORMATS.get(str(stated.get("quant_method")))
    return maker(stated) if maker is not None else None


def _asked(stated: dict[str, Any], field: str, default: Any, served: tuple[Any, ...]) -> Any:
    """A field's value; ValueError where it is none of those served."""
    value = stated.get(field, default)
    if isinstance(value, (list, dict)) or value not in served:
        raise ValueError(f"its {field} is {value!r}; served are {', '.join(map(str, served))}")
    return value


# ---- Integers in words of 32 bits ----------------------------------------------------------------


def unpack(words: Tensor, bits: int) -> Tensor:
    """Numbers from 0 on, the lowest bits first: words (R, C) int32 to (R, C * 32 / bits) int32.

    >>> unpack(torch.tensor([[0x76543210]], dtype=torch.int32), 4)
    tensor([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.int32)
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(2) >> shifts) & ((1 << bits) - 1)).flatten(1)


def _centred(numbers: Tensor, zeros: Tensor | None, scales: Tensor, bits: int) -> Quantized:
    """From numbers (N, I) and zeros (N, G) that count from 0 on; zeros None: the middle stands for 0."""
    middle = 1 << (bits - 1)
    zeros = None if zeros is None else zeros - middle
    return _checked((numbers - middle).to(torch.int8), zeros, scales, bits)


def _checked(integers: Tensor, zeros: Tensor | None, scales: Tensor, bits: int) -> Quantized:
    fits = scales.dim() == 2 and len(scales) == len(integers) and integers.shape[1] % scales.shape[1] == 0
    if not fits or (zeros is not None and zeros.shape != scales.shape):
        raise ValueError(f"scales of shape {tuple(scales.shape)} do not fit {tuple(integers.shape)} integers")
    zeros = zeros.float() if zeros is not None and zeros.any() else None
    return Quantized(integers, scales.float().contiguous(), zeros, bits)


def _in_groups(weight: Quantized, groups: Tensor | None) -> Quantized | Tensor:
    """Where inputs belong to these groups, (I,): as it is where they lie one after the other, else floats."""
    num_inputs, num_groups = weight.integers.shape[1], weight.scales.shape[1]
    if groups is None or torch.equal(groups.long(), torch.arange(num_inputs) // weight.group):
        return weight
    if len(groups) != num_inputs or groups.min() < 0 or groups.max() >= num_groups:
        raise ValueError("g_idx does not name the group of each input")
    zeros = 0.0 if weight.zeros is None else weight.zeros[:, groups]
    return (weight.integers - zeros) * weight.scales[:, groups]


def _gptq(stated: dict[str, Any]) -> Format:
    bits = _asked(stated, "bits", 4, (4, 8))
    is_first_version = _asked(stated, "checkpoint_format", "gptq", ("gptq", "gptq_v2")) == "gptq"
    if stated.get("dynamic"):
        raise ValueError("it has settings of their own for some layers (dynamic)")

    def read(tensors: Tensors) -> Quantized | Tensor:
        # The first version wrote zeros less one.
        zeros = (unpack(tensors["qzeros"], bits) + is_first_version) & ((1 << bits) - 1)
        numbers = unpack(tensors["qweight"].T.contiguous(), bits)
        return _in_groups(_centred(numbers, zeros.T, tensors["scales"].T, bits), tensors.get("g_idx"))

    words = ("I32",)
    parts = Part("qweight", words), Part("qzeros", words), Part("scales", FLOATS), Part("g_idx", words, True)
    return Format("gptq", parts, lambda shape: (shape[1], shape[0] * 32 // bits), read)


def _awq(stated: dict[str, Any]) -> Format:
    _asked(stated, "bits", 4, (4,))
    _asked(stated, "version", "gemm", ("gemm", "GEMM"))

    def in_order(words: Tensor) -> Tensor:
        return unpack(words, 4).view(len(words), -1, 8)[:, :, AWQ_ORDER].flatten(1).T

    def read(tensors: Tensors) -> Quantized:
        numbers, zeros = in_order(tensors["qweight"]), in_order(tensors["qzeros"])
        return _centred(numbers, zeros, tensors["scales"].T, 4)

    parts = Part("qweight", ("I32",)), Part("qzeros", ("I32",)), Part("scales", FLOATS)
    return Format("awq", parts, lambda shape: (shape[1] * 8, shape[0]), read)


# ---- compressed-tensors --------------------------------------------------------------------------


def _compressed(stated: dict[str, Any]) -> Format:
    formats = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
    kind = _asked(stated, "format", None, formats)
    if (stated.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise ValueError("it has a sparsity_config")
    if (stated.get("transform_config") or {}).get("config_groups"):
        raise ValueError("it has a transform_config")
    weights = [(group or {}).get("weights") or {} for group in (stated.get("config_groups") or {}).values()]
    all_bits: set[Any] = {one.get("num_bits") for one in weights}
    served = (4, 8) if kind == "pack-quantized" else (8,)
    if len(all_bits) != 1 or not all_bits <= set(served):
        raise ValueError(f"its weights' num_bits are {all_bits}; served are {', '.join(map(str, served))}")
    (bits,) = all_bits
    if kind == "naive-quantized":
        kind = "float-quantized" if weights[0].get("type") == "float" else "int-quantized"
    parts: tuple[Part, ...]

    def read_packed(tensors: Tensors) -> Quantized | Tensor:
        num_outputs, num_inputs = tensors["weight_shape"].tolist()
        numbers, zeros = unpack(tensors["weight_packed"], bits), tensors.get("weight_zero_point")
        if len(numbers) != num_outputs or not 0 <= numbers.shape[1] - num_inputs < 32 // bits:
            raise ValueError(f"weight_shape is {num_outputs, num_inputs}, of integers {tuple(numbers.shape)}")
        if zeros is not None:
            zeros = unpack(zeros.T.contiguous(), bits).T[:num_outputs]
        weight = _centred(numbers[:, :num_inputs], zeros, tensors["weight_scale"], bits)
        groups = tensors.get("weight_g_idx")
        return _in_groups(weight, None if groups is None or (groups == -1).all() else groups)

    def read_plain(tensors: Tensors) -> Quantized | Tensor:
        weight, scales = tensors["weight"], tensors["weight_scale"].float()
        if scales.numel() == 1:
            scales = scales.reshape(1, 1)
        rows, columns = (size / n for size, n in zip(weight.shape, scales.shape, strict=True))
        if not (rows.is_integer() and columns.is_integer()):
            raise ValueError(
                f"scales of shape {tuple(scales.shape)} do not fit {tuple(weight.shape)} weights"
            )
        scales = scales.repeat_interleave(int(rows), 0)
        if kind == "int-quantized":
            return _checked(weight, tensors.get("weight_zero_point"), scales, 8)
        return weight.float() * scales.repeat_interleave(int(columns), 1)

    name = "compressed-tensors"
    unused = "input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale"
    if kind == "pack-quantized":
        parts = (
            *(
                Part("weight_packed", ("I32",)),
                Part("weight_scale", FLOATS),
                Part("weight_shape", ("I64", "I32")),
            ),
            *(Part("weight_zero_point", ("I32",), True), Part("weight_g_idx", ("I32",), True)),
        )
        return Format(name, parts, lambda shape: (shape[0], shape[1] * 32 // bits), read_packed, unused)
    stored = "I8" if kind == "int-quantized" else "F8_E4M3"
    parts = Part("weight", (stored,)), Part("weight_scale", FLOATS), Part("weight_zero_point", ("I8",), True)
    return Format(name, parts, lambda shape: shape, read_plain, unused)


# ---- bitsandbytes --------------------------------------------------------------------------------


def _bitsandbytes(stated: dict[str, Any]) -> Format:
    parts: tuple[Part, ...]
    if stated.get("load_in_8bit") or stated.get("_load_in_8bit"):

        def read_8_bits(tensors: Tensors) -> Quantized:
            return _checked(tensors["weight"], None, tensors["SCB"].float().unsqueeze(1) / 127, 8)

        parts = Part("weight", ("I8",)), Part("SCB", ("F32",)), Part("weight_format", ("U8",), True)
        return Format("bitsandbytes", parts, lambda shape: shape, read_8_bits)
    kind = _asked(stated, "bnb_4bit_quant_type", "fp4", ("nf4", "fp4"))
    state_end = f"weight.quant_state.bitsandbytes__{kind}"

    def read(tensors: Tensors) -> Tensor:
        state = json.loads(bytes(tensors[state_end].tolist()))
        scales = tensors["weight.absmax"]
        if "weight.nested_absmax" in tensors:
            table, of_blocks = tensors["weight.nested_quant_map"], tensors["weight.nested_absmax"]
            blocks = of_blocks.repeat_interleave(state["nested_blocksize"])[: len(scales)]
            scales = table[scales.long()] * blocks + state["nested_offset"]
        halves = tensors["weight"].flatten().long()
        values = tensors["weight.quant_map"][torch.stack((halves >> 4, halves & 15), 1).flatten()]
        scales = scales.float().repeat_interleave(state["blocksize"])[: len(values)]
        return (values * scales).view(state["shape"])

    parts = (
        *(Part("weight", ("U8",)), Part("weight.absmax", ("F32", "U8")), Part("weight.quant_map", ("F32",))),
        *(Part("weight.nested_absmax", ("F32",), True), Part("weight.nested_quant_map", ("F32",), True)),
        Part(state_end, ("U8",)),
    )
    return Format("bitsandbytes", parts, lambda _: None, read)


FORMATS = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "bitsandbytes": _bitsandbytes}
