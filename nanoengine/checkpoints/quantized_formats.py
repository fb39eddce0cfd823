"""Reads quantized checkpoints without their packages: GPTQ, AWQ, compressed-tensors, bitsandbytes and FP8.

Each format stores a linear layer's weight as several tensors. If they are integers in groups of inputs, they
are read as a `Quantized`, which a device may compute with directly. All others are dequantized to floats.

Sources: AutoGPTQ's and AutoAWQ's packing of `qweight`; compressed_tensors/compressors;
bitsandbytes/functional.py; transformers/integrations/finegrained_fp8.py. Shape letters: N outputs, I inputs,
G groups of inputs.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanoengine.backends.quantization import Quantized
from nanoengine.checkpoints.checks import UnsupportedModelError
from nanoengine.checkpoints.safetensors_files import Files, TensorHeader

Tensors = Mapping[str, Tensor]  # the parts of one weight, by the ends of their names
Block = tuple[int | None, int | None]  # outputs and inputs that share a scale; None: all of them
FLOATS, WORDS = ("F16", "BF16", "F32"), ("I32",)
# Scales of activations and of the KV cache, which are ignored
UNUSED = (
    *("activation_scale", "input_scale", "input_zero_point", "output_scale"),
    *("k_scale", "v_scale", "kv_scale"),
)
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # the place of each of eight consecutive outputs in a word of 32 bits


class Format(NamedTuple):
    """Describes how a checkpoint stores quantized weights, each as several tensors."""

    parts: Mapping[str, tuple[str, ...]]  # ends of tensors' names -> dtypes. What has the first is quantized
    # Returns a weight (N, I), given its parts. May raise any error if the parts do not fit each other.
    read: Callable[[Tensors], Quantized | Tensor]
    optional: tuple[str, ...] = ()  # parts that a weight may lack


def _one_of(stated: dict[str, Any], field: str, default: Any, supported: tuple[Any, ...]) -> Any:
    """Return a field's value. Raises ValueError if the value is not supported."""
    value = stated.get(field, default)
    if value not in supported:
        raise ValueError(f"its {field} is {value!r}; supported: {', '.join(map(str, supported))}")
    return value


def _blocks(settings: Iterable[dict[str, Any]], structure: str = "block_structure") -> set[Block]:
    """Return the blocks that share a scale. Settings of weights that state no block are left out."""
    blocks: set[Block] = set()
    for stated in settings:
        strategy, size, block = (stated.get(name) for name in ("strategy", "group_size", structure))
        is_size = type(size) is int and size > 0
        if strategy == "block":
            if not isinstance(block, list) or [type(n) for n in block] != [int, int] or min(block) < 1:
                raise ValueError(f"its {structure} is {block!r}; it must be two numbers above 0")
            blocks.add((block[0], block[1]))
        elif is_size and strategy in (None, "group"):
            blocks.add((1, size))
        elif strategy == "tensor":
            blocks.add((None, None))
        elif strategy == "channel" or (strategy is None and size == -1):
            blocks.add((1, None))
        elif strategy is not None:
            raise ValueError(f"its strategy {strategy!r} with group_size {size!r} is not supported")
        elif size is not None:
            raise ValueError(f"its group_size is {size!r}; supported: -1 and numbers above 0")
    return blocks


# ---- Scales of blocks ----------------------------------------------------------------------------


def _places(shape: torch.Size, scales: torch.Size, blocks: set[Block]) -> tuple[Tensor, Tensor]:
    """Return the row of the scales for each output, (N,), and the column for each input, (I,).

    The scales' shape must fit exactly one of the blocks that the config states. The last block of a row or
    column may be smaller. If the config states none, all blocks have the same size.
    """
    fitting = set()
    if len(shape) == len(scales) == 2 and min(*shape, *scales) > 0:
        if not blocks and not any(size % count for size, count in zip(shape, scales, strict=True)):
            blocks = {(shape[0] // scales[0], shape[1] // scales[1])}
        for block in blocks:
            rows, columns = (min(part or size, size) for part, size in zip(block, shape, strict=True))
            if scales == (-(-shape[0] // rows), -(-shape[1] // columns)):
                fitting.add((rows, columns))
    if len(fitting) != 1:
        stated = " or ".join(f"blocks of {n or 'all'} x {m or 'all'}" for n, m in blocks)
        raise ValueError(
            f"scales of shape {tuple(scales)} do not fit {tuple(shape)} weights in {stated or 'equal blocks'}"
        )
    ((rows, columns),) = fitting
    return torch.arange(shape[0]) // rows, torch.arange(shape[1]) // columns


def _scaled(
    weight: Tensor, zeros: Tensor | None, scales: Tensor, bits: int, blocks: set[Block], groups: Any = None
) -> Quantized | Tensor:
    """Return a weight (N, I) from integers of so many bits or, with 0 bits, from floats.

    Integers are dequantized unless their groups are consecutive and of one size. `groups`, (I,), is the group
    of each input, if the checkpoint states it.
    """

    def as_matrix(x: Tensor) -> Tensor:
        return x.float() if x.dim() > 1 else x.float().reshape(-1, 1)  # one number per output

    scales, zeros = as_matrix(scales), None if zeros is None else as_matrix(zeros)
    if zeros is not None and zeros.shape != scales.shape:
        raise ValueError(f"scales of shape {tuple(scales.shape)} do not fit {tuple(zeros.shape)} zeros")
    num_inputs = weight.shape[-1]
    if groups is None:
        rows, groups = _places(weight.shape, scales.shape, blocks)
        scales, zeros = scales[rows], None if zeros is None else zeros[rows]
    elif scales.dim() != 2 or len(scales) != len(weight):
        raise ValueError(f"scales of shape {tuple(scales.shape)} do not fit {tuple(weight.shape)} integers")
    elif groups.shape != (num_inputs,) or groups.min() < 0 or groups.max() >= scales.shape[1]:
        raise ValueError("g_idx does not name the group of each input")
    groups = groups.long()
    if zeros is not None and not zeros.any():
        zeros = None
    in_turn = torch.arange(num_inputs) * scales.shape[1] // num_inputs
    if bits and num_inputs % scales.shape[1] == 0 and torch.equal(groups, in_turn):
        return Quantized(weight.to(torch.int8), scales.contiguous(), zeros, bits)
    return (weight.float() - (0.0 if zeros is None else zeros[:, groups])) * scales[:, groups]


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack unsigned integers, the lowest bits first: words (R, C) int32 to (R, C * 32 / bits) int32.

    >>> unpack(torch.tensor([[0x76543210]], dtype=torch.int32), 4)
    tensor([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.int32)
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(2) >> shifts) & ((1 << bits) - 1)).flatten(1)


PARTS = {"qweight": WORDS, "qzeros": WORDS, "scales": FLOATS}  # of GPTQ and AWQ


def _gptq(stated: dict[str, Any]) -> Format:
    layers = _of_layers(stated)
    all_bits = {_one_of(layer, "bits", 4, (4, 8)) for layer in layers}
    is_first_version = _one_of(stated, "checkpoint_format", "gptq", ("gptq", "gptq_v2")) == "gptq"
    blocks = _blocks(layers)

    def read(tensors: Tensors) -> Quantized | Tensor:
        bits = min(all_bits)
        if len(all_bits) > 1 and 4 * tensors["qzeros"].shape[1] == tensors["qweight"].shape[1]:
            bits = 8  # four zeros in each word
        middle = 1 << (bits - 1)
        # The first version stores zeros minus one.
        zeros = (unpack(tensors["qzeros"], bits) + is_first_version) & ((1 << bits) - 1)
        numbers, scales = unpack(tensors["qweight"].T.contiguous(), bits), tensors["scales"].T
        return _scaled(numbers - middle, zeros.T - middle, scales, bits, blocks, tensors.get("g_idx"))

    return Format({**PARTS, "g_idx": WORDS}, read, ("g_idx",))


def _of_layers(stated: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of all quantized layers. The files show which ones a rule leaves as floats."""
    rules = stated.get("dynamic") or {}
    if not isinstance(rules, dict) or not all(isinstance(rule, dict) for rule in rules.values()):
        raise ValueError(f"its dynamic is {rules!r:.99}; it must map names to settings")
    kept = [rule for name, rule in rules.items() if not name.startswith("-") and rule.get("bits", 0) <= 8]
    return [stated, *({**stated, **rule} for rule in kept)]


def _auto_round(stated: dict[str, Any]) -> Format:
    stated = {**stated, "dynamic": stated.get("extra_config")}
    packing = {*str(stated.get("packing_format") or stated.get("backend")).split(":")}
    for names, maker in (({"gptq", "auto_gptq"}, _gptq), ({"awq", "auto_awq"}, _awq)):
        if names & packing:
            return maker(stated)
    supported = "auto_round:auto_gptq, auto_round:auto_awq"
    raise ValueError(f"its packing_format is {stated.get('packing_format')!r}; supported: {supported}")


def _awq(stated: dict[str, Any]) -> Format:
    layers = _of_layers(stated)
    for layer in layers:
        _one_of(layer, "bits", 4, (4,))
    _one_of(stated, "version", "gemm", ("gemm", "GEMM"))
    blocks = _blocks(layers)

    def in_order(words: Tensor) -> Tensor:
        return unpack(words, 4).view(len(words), -1, 8)[:, :, AWQ_ORDER].flatten(1).T

    def read(tensors: Tensors) -> Quantized | Tensor:
        numbers, zeros = in_order(tensors["qweight"]), in_order(tensors["qzeros"])
        return _scaled(numbers - 8, zeros - 8, tensors["scales"].T, 4, blocks)

    return Format(PARTS, read)


# ---- compressed-tensors and fp8 ------------------------------------------------------------------


def _compressed(stated: dict[str, Any]) -> Format:
    formats = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
    groups = [group or {} for group in (stated.get("config_groups") or {}).values()]
    if stated.get("format") == "mixed-precision":
        kinds = {group.get("format") for group in groups}
        if len(kinds) != 1:
            raise ValueError(f"its groups have the formats {kinds}; supported: one format for all")
        stated = {**stated, "format": kinds.pop()}
    kind = _one_of(stated, "format", None, formats)
    if (stated.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise ValueError("it has a sparsity_config, which is not supported")
    if (stated.get("transform_config") or {}).get("config_groups"):
        raise ValueError("it has a transform_config, which is not supported")
    weights = [group.get("weights") or {} for group in groups]
    all_bits: set[Any] = {one.get("num_bits") for one in weights}
    supported = {4, 8} if kind == "pack-quantized" else {8}
    if not all_bits or not all_bits <= supported:
        raise ValueError(f"its weights' num_bits are {all_bits}; supported: {supported}")
    if kind == "naive-quantized":
        kind = "float-quantized" if weights[0].get("type") == "float" else "int-quantized"
    blocks = _blocks(weights)

    def read_packed(tensors: Tensors) -> Quantized | Tensor:
        num_outputs, num_inputs = tensors["weight_shape"].tolist()
        words = tensors["weight_packed"].shape[1]
        fitting = [bits for bits in all_bits if -(-num_inputs * bits // 32) == words]
        bits = min(fitting or all_bits)
        numbers, zeros = unpack(tensors["weight_packed"], bits), tensors.get("weight_zero_point")
        if len(numbers) != num_outputs or not 0 <= numbers.shape[1] - num_inputs < 32 // bits:
            raise ValueError(f"weight_shape {num_outputs, num_inputs} does not fit {tuple(numbers.shape)}")
        middle = 1 << (bits - 1)
        if zeros is not None and zeros.dtype == torch.int32:  # else int8, not packed
            zeros = unpack(zeros.T.contiguous(), bits).T[:num_outputs] - middle
        groups = tensors.get("weight_g_idx")
        if groups is not None and (groups == -1).all():
            groups = None
        integers = numbers[:, :num_inputs] - middle
        return _scaled(integers, zeros, tensors["weight_scale"], bits, blocks, groups)

    def read_plain(tensors: Tensors) -> Quantized | Tensor:
        weight, scales, zeros = tensors["weight"], tensors["weight_scale"], tensors.get("weight_zero_point")
        if kind == "float-quantized" and zeros is not None:
            if zeros.any():
                raise ValueError("its floats have a zero point, which is not supported")
            zeros = None
        return _scaled(weight, zeros, scales, 8 if kind == "int-quantized" else 0, blocks)

    optional = "weight_zero_point", "weight_g_idx"
    if kind == "pack-quantized":
        packed = {"weight_packed": WORDS, "weight_scale": FLOATS, "weight_shape": ("I64", "I32")}
        others = {"weight_zero_point": ("I32", "I8"), "weight_g_idx": WORDS}
        return Format({**packed, **others}, read_packed, optional)
    stored = "I8" if kind == "int-quantized" else "F8_E4M3"
    plain = {"weight": (stored,), "weight_scale": FLOATS, "weight_zero_point": ("I8",)}
    return Format(plain, read_plain, optional)


def _fp8(stated: dict[str, Any]) -> Format:
    blocks: set[Block] = {(None, None), (1, None)}  # a scale for the whole weight, or for each output
    if stated.get("weight_block_size") is not None:
        blocks = _blocks([{**stated, "strategy": "block"}], "weight_block_size")

    def read(tensors: Tensors) -> Quantized | Tensor:
        scales = [tensors[name] for name in optional if name in tensors]
        if len(scales) != 1:
            raise ValueError(f"it has {len(scales)} of weight_scale_inv and weight_scale")
        return _scaled(tensors["weight"], None, scales[0], 0, blocks)

    optional = "weight_scale_inv", "weight_scale"
    return Format({"weight": ("F8_E4M3",), **dict.fromkeys(optional, (*FLOATS, "F8_E8M0"))}, read, optional)


def _modelopt(stated: dict[str, Any]) -> Format:
    _one_of(stated, "quant_algo", None, ("FP8",))
    return _fp8({})


def _bitsandbytes(stated: dict[str, Any]) -> Format:
    if stated.get("load_in_8bit") or stated.get("_load_in_8bit"):

        def read_8_bits(tensors: Tensors) -> Quantized | Tensor:
            if (order := tensors.get("weight_format")) is not None and order.any():
                raise ValueError(f"weight_format is {order.tolist()}; supported: 0, row by row")
            return _scaled(tensors["weight"], None, tensors["SCB"].unsqueeze(1) / 127, 8, {(1, None)})

        parts_of_8 = {"weight": ("I8",), "SCB": ("F32",), "weight_format": ("U8",)}
        return Format(parts_of_8, read_8_bits, ("weight_format",))
    kind = _one_of(stated, "bnb_4bit_quant_type", "fp4", ("nf4", "fp4"))
    state_end = f"weight.quant_state.bitsandbytes__{kind}"

    def read(tensors: Tensors) -> Tensor:
        state = json.loads(bytes(tensors[state_end].tolist()))
        scales = tensors["weight.absmax"].flatten()
        # bnb_4bit_quant_storage only says as what the bytes are stored
        halves = tensors["weight"].flatten().view(torch.uint8).long()
        if ("weight.nested_absmax" in tensors) != (scales.dtype == torch.uint8):
            raise ValueError(f"absmax is {scales.dtype}; uint8 needs nested_absmax, floats exclude it")
        if "weight.nested_absmax" in tensors:
            table, of_blocks = tensors["weight.nested_quant_map"], tensors["weight.nested_absmax"]
            larger = _spread(of_blocks, state["nested_blocksize"], len(scales))
            scales = table[scales.long()] * larger + state["nested_offset"]
        size = math.prod(state["shape"])
        if len(halves) != -(-size // 2):
            raise ValueError(f"{len(halves)} bytes do not make a weight of shape {state['shape']}")
        values = tensors["weight.quant_map"][torch.stack((halves >> 4, halves & 15), 1).flatten()[:size]]
        return (values * _spread(scales, state["blocksize"], size)).view(state["shape"])

    optional = "weight.nested_absmax", "weight.nested_quant_map"
    tables = dict.fromkeys(("weight.quant_map", *optional), ("F32",))
    parts = {"weight.absmax": ("F32", "U8"), "weight": ("U8", *FLOATS), state_end: ("U8",), **tables}
    return Format(parts, read, optional)


def _spread(scales: Tensor, block: Any, count: int) -> Tensor:
    """Return the scale of each of `count` numbers. Each block of consecutive numbers shares a scale."""
    if type(block) is not int or block < 1 or len(scales) != -(-count // block):
        raise ValueError(f"{len(scales)} scales do not fit {count} numbers in blocks of {block!r}")
    return scales[torch.arange(count) // block]


FORMATS = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "gptq_marlin": _gptq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
}
DEQUANTIZED = ("mxfp4",)  # schemes that transformers dequantizes while loading


# ---- Checkpoints and layers with quantized weights -----------------------------------------------


def choose_reader(stated: Any, config: Any, part: Any, model_impl: str) -> dict[str, Any] | None:
    """Return the settings if this file reads the weights, or None if transformers dequantizes them.

    Changes the configs, of the model and of its language model (None: it is not multimodal), so that
    transformers does not use the format's own package.
    """
    scheme = stated.get("quant_method") or stated.get("quant_algo") or "an unnamed scheme"
    if (make_format := FORMATS.get(str(stated.get("quant_method")))) is not None:
        try:
            make_format(stated)
        except ValueError as error:
            raise UnsupportedModelError(f"its weights are quantized with {scheme}, and {error}") from None
        for one in filter(None, (config, part)):
            vars(one).pop("quantization_config", None)
        return stated  # type: ignore[no-any-return]
    if scheme not in DEQUANTIZED:
        served = ", ".join((*FORMATS, *DEQUANTIZED))
        raise UnsupportedModelError(f"its weights are quantized with {scheme}; supported: {served}")
    if model_impl == "nanoengine":
        raise UnsupportedModelError(
            f'its weights are quantized with {scheme}, which needs model_impl="transformers"'
        )
    if part is not None:
        raise UnsupportedModelError("quantized multimodal models are not supported")
    config.quantization_config = {**stated, "dequantize": True}
    return None


class QuantizedFiles(Files):
    """Reads a quantized checkpoint's tensors by name. A weight made of several tensors has one header."""

    def __init__(
        self, path: Path, rename: Callable[[str], str | None] | None, stated: dict[str, Any]
    ) -> None:
        super().__init__(path, rename)
        self.method: str = stated["quant_method"]
        weight_format = self.weight_format = FORMATS[self.method](stated)
        self._parts: dict[str, dict[str, TensorHeader]] = {}  # weight -> parts, by the ends of their names
        headers, (first, first_dtypes) = self.headers, next(iter(weight_format.parts.items()))
        for name, header in list(headers.items()):
            if not name.endswith(f".{first}") or header.dtype not in first_dtypes:
                continue
            base, parts = name.removesuffix(first), {}
            for end, dtypes in weight_format.parts.items():
                if (found := headers.pop(base + end, None)) is not None:
                    if found.dtype not in dtypes:
                        raise ValueError(
                            f"{found.file} holds tensor {base + end!r} as {found.dtype}; "
                            f"in {self.method} it must be one of {', '.join(dtypes)}"
                        )
                    parts[end] = found
                elif end not in weight_format.optional:
                    raise ValueError(f"{self.path} lacks tensor {base + end!r}, which {name!r} needs")
            self._parts[f"{base}weight"] = parts
            headers[f"{base}weight"] = header._replace(dtype="F32", shape=None)
        if not self._parts:
            raise ValueError(f"{self.path}: config.json says {self.method}, but no weight has this format")
        for name in [name for name in headers if name.rpartition(".")[2] in UNUSED]:
            del headers[name]

    def is_quantized(self, name: str) -> bool:
        return name in self._parts

    def read(self, name: str) -> Tensor | Quantized:
        if name not in self._parts:
            return super().read(name)
        try:
            return self.weight_format.read({end: self._get(part) for end, part in self._parts[name].items()})
        except (ValueError, KeyError, RuntimeError, IndexError, TypeError) as error:
            raise ValueError(f"{self.path}: tensor {name!r}, {self.method}, is invalid: {error}") from error
