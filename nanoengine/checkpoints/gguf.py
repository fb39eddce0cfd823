"""Reads GGUF files, llama.cpp's format: one file holds a model's config, weights and tokenizer.

For the families of decoder.py, this file reads config and weights, and the types in READERS stay quantized.
transformers reads all other families. gguf_tokenizer.py reads the tokenizer.

Sources: ggml's docs/gguf.md; gguf-py/gguf/quants.py and constants.py for the layouts.
"""

import functools
import math
import os
import re
import struct
from collections.abc import Callable
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nanoengine.backends.quantization import Quantized
from nanoengine.checkpoints.checks import UnsupportedModelError, as_value_error, check_fields
from nanoengine.checkpoints.safetensors_files import Files, TensorHeader
from nanoengine.signals import uninterrupted

try:
    import gguf
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    from nanoengine.checkpoints.gguf_fields import OWN, ModelFields, check_types
except ImportError:
    raise ValueError("a GGUF file needs the package gguf: pip install 'nanoengine[quantized]'") from None

# transformers builds this table again for each module of a model, which takes a second for 62 layers.
gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)

TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
OF_LAYERS = {  # after the prefixes "blk.0." and "model.layers.0."
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
DIVISORS = "rope_freqs.weight"  # a tensor of divisors of the rotary frequencies
LAYER = re.compile(r"(?:\w+\.)?blk\.([0-9]{1,9})\.")
INTEGERS = "I8", "I16", "I32", "I64"
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # types of tokens
# Names of tokens that end a turn, whether or not the header says so. Source: llama.cpp's src/llama-vocab.cpp
ENDS = "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> "
ENDS += "</s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> "
ENDS += "<|tool_response> <\uff5cend\u2581of\u2581sentence\uff5c> [e~["
# These tokens -> a name that does not end a turn in a file that has all of them.
NOT_ENDS = {"<|return|> <|call|>": "<|end|>", "<|calls|> <|flush|>": "<|end|>", "<|tool_response>": "</s>"}
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Number of a metadata type -> its name in `struct` and NumPy. 8 is a string and 9 an array.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# Limits far above any real file, so that no header takes long to read.
MAX_ENTRIES = 1 << 13  # of metadata fields, and of tensors
MAX_STRINGS = 1 << 22  # in all arrays together
MAX_DIMENSIONS = 4  # ggml's own limit
LENGTH = struct.Struct("<Q")


class TensorEntry(NamedTuple):
    """Describes a tensor, as the header does. Its bytes were checked to be inside the file."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # in PyTorch's order
    start: int  # offset in the file, in bytes
    num_bytes: int


class Header:
    """Reads the metadata and the list of tensors at the start of a GGUF file, and checks every size there."""

    def __init__(self, data: mmap) -> None:
        self.data, self._place, self._num_strings = data, 4, 0
        if data[:4] != b"GGUF":
            raise ValueError(f"it starts with {data[:4]!r}, not with b'GGUF'")
        version, num_tensors, num_fields = self._take("IQQ")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}, only 2 and 3 are supported")
        if max(num_tensors, num_fields) > MAX_ENTRIES:
            counts = f"{num_tensors} tensors and {num_fields} fields"
            raise ValueError(f"it lists {counts}, the limit is {MAX_ENTRIES}")
        self.fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._string()
            if name in self.fields:
                raise ValueError(f"it has the field {name!r} twice")
            self.fields[name] = self._value(*self._take("I"))
        self.tensors = self._tensors(num_tensors)

    def _take(self, layout: str) -> tuple[Any, ...]:
        """Unpack and return the next values, and move past them."""
        start = self._skip(struct.calcsize(f"<{layout}"))
        return struct.unpack_from(f"<{layout}", self.data, start)

    def _skip(self, num_bytes: int) -> int:
        """Move forward by num_bytes, and return the offset before."""
        start = self._place
        if num_bytes > len(self.data) - start:
            raise ValueError(f"it ends at byte {len(self.data)}, inside {num_bytes} bytes from byte {start}")
        self._place += num_bytes
        return start

    def _string(self) -> str:
        (length,) = self._take("Q")
        start = self._skip(length)
        return self.data[start : self._place].decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array(*self._take("IQ"))
        if kind not in SCALARS:
            raise ValueError(f"a field has the unknown type {kind}")
        return self._take(SCALARS[kind])[0]

    def _array(self, kind: int, count: int) -> Any:
        if kind in SCALARS:
            dtype = np.dtype(SCALARS[kind]).newbyteorder("<")
            return np.frombuffer(self.data, dtype, count, self._skip(count * dtype.itemsize))
        if kind != STRING:
            raise ValueError(f"an array has elements of type {kind}, which is not supported")
        self._num_strings += count
        if self._num_strings > MAX_STRINGS:
            raise ValueError(f"its arrays have {self._num_strings} strings, the limit is {MAX_STRINGS}")
        strings: list[bytes] = []  # each is decoded only when needed
        end = self._place
        while len(strings) < count and (start := end + LENGTH.size) <= len(self.data):
            end = start + LENGTH.unpack_from(self.data, end)[0]
            strings.append(self.data[start:end])
        self._skip(end - self._place)
        return strings

    def _tensors(self, count: int) -> dict[str, TensorEntry]:
        tensors: dict[str, TensorEntry] = {}
        for _ in range(count):
            name, (num_dimensions,) = self._string(), self._take("I")
            if name in tensors or not 1 <= num_dimensions <= MAX_DIMENSIONS:
                raise ValueError(f"tensor {name!r} is listed twice or has {num_dimensions} dimensions")
            shape = self._take(f"{num_dimensions}Q")[::-1]
            number, offset = self._take("IQ")
            kind = GGMLQuantizationType(number)
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if 0 in shape or shape[-1] % block or (block > 1 and num_dimensions == 1):
                raise ValueError(f"tensor {name!r} has shape {shape}, which is not possible in {kind.name}")
            tensors[name] = TensorEntry(kind, shape, offset, math.prod(shape) // block * block_bytes)
        alignment = self.fields.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment.bit_count() != 1:
            raise ValueError(f"its general.alignment must be a power of two, got {alignment!r}")
        first, end = -(-self._place // alignment) * alignment, 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
            if tensor.start % alignment or tensor.start < end:
                raise ValueError(f"tensor {name!r} is not aligned or overlaps another tensor")
            end = tensor.start + tensor.num_bytes
            if first + end > len(self.data):
                raise ValueError(f"tensor {name!r} ends at byte {first + end}, the file at {len(self.data)}")
            tensors[name] = tensor._replace(start=first + tensor.start)
        return tensors


class GGUFFile(Files):
    """Reads the config and weights of a model in a GGUF file. Opening it reads only the header, or fails."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with as_value_error(path):
            with path.open("rb") as file:
                self._version = _version(os.fstat(file.fileno()))
                header = Header(mmap(file.fileno(), 0, access=ACCESS_READ))
            self.fields, self._data, self._tensors = header.fields, header.data, header.tensors
            self.architecture: Any = self.fields.get("general.architecture")
            check_types(self.fields, self.architecture)
            if self.fields.get("split.count", 0) > 1:
                raise ValueError("it is one of several files; join them with llama-gguf-split --merge")
            if self.architecture is None:
                raise ValueError("it has no general.architecture")
            self.is_known = self.architecture in OWN
            shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
            self._model = ModelFields(self.fields, self.architecture, shapes)
            self.headers = {}
            for own_name, tensor in self._tensors.items():
                if own_name != DIVISORS:
                    name, kind = saved_name(own_name), tensor.kind.name
                    if name in self.headers:
                        raise ValueError(f"it has two tensors for {name!r}")
                    dtype = kind if kind in INTEGERS else "F32"
                    self.headers[name] = TensorHeader(path, own_name, dtype, tensor.shape)
            self._check_sizes()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path: another rank opens the file itself."""
        return GGUFFile, (self.path,)

    def is_current(self) -> bool:
        """Return whether the file at this path is still the one that was opened."""
        return self.path.is_file() and self._version == _version(self.path.stat())

    def _check_sizes(self) -> None:
        """Check the stated numbers of layers, tokens and merges, so that no layer gets lost."""
        stated = self._model.number("block_count")
        layers = {int(match[1]) for name in self._tensors if (match := LAYER.match(name))}
        if len(layers) != stated or max(layers, default=-1) >= len(layers):
            count = f"its {self.architecture}.block_count is {stated}"
            raise ValueError(f"{count}, but it has {len(layers)} layers")
        if len(self._tensors) < (9 if self.is_known else 3) * len(layers):
            raise ValueError(f"it has only {len(self._tensors)} tensors for {len(layers)} layers")
        self._model.number("context_length", 1)
        tokens, merges = (self.fields.get(f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
        self.num_tokens = len(tokens) if isinstance(tokens, list) else 0
        embedding = self._tensors.get("token_embd.weight")
        if embedding is not None and self.num_tokens > embedding.shape[0]:
            raise ValueError(f"it has {self.num_tokens} tokens for {embedding.shape[0]} embeddings")
        # A token of n bytes has at most n - 1 merges. transformers reads merges slowly.
        if isinstance(tokens, list) and isinstance(merges, list) and len(merges) > sum(map(len, tokens)):
            raise ValueError(f"it has {len(merges)} merges, too many for {self.num_tokens} tokens")

    def strings(self, name: str) -> list[str]:
        """Return a field that must be an array of strings."""
        value = self.fields.get(name)
        if not isinstance(value, list):
            raise ValueError(f"its {name} must be an array of strings, got {value!r:.99}")
        return [string.decode() for string in value]

    def token_id(self, name: str) -> int | None:
        """Return the id of a special token, such as "eos", or None if the file has none."""
        return self.fields.get(f"tokenizer.ggml.{name}_token_id")

    def end_ids(self) -> list[int]:
        """Return the tokens that end a turn: those that the header states, and those with a name in ENDS.

        Named tokens may be user-defined, as in Phi-3. But a user-defined `</s>` is HTML, as in Gemma.
        """
        stated = [i for name in ("eos", "eot", "eom") if (i := self.token_id(name)) is not None]
        tokens, types = (self.fields.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
        found: dict[str, int] = {}
        if isinstance(tokens, list) and isinstance(types, np.ndarray) and len(types) == self.num_tokens:
            names = {name.encode(): name for name in ENDS.split()}
            for i in np.flatnonzero(np.isin(types, (CONTROL, USER_DEFINED))).tolist():
                name = names.get(tokens[i])
                if name is not None and (name != "</s>" or types[i] == CONTROL):
                    found[name] = i
        not_ends = {found.get(name) for others, name in NOT_ENDS.items() if found.keys() >= {*others.split()}}
        return [i for i in dict.fromkeys([*stated, *found.values()]) if i not in not_ends]

    def read_config(self) -> Any:
        """Return the model's transformers config. Checks its sizes against the file's tensors."""
        with as_value_error(self.path):
            config = self._model.config()
            config.bos_token_id = self.token_id("bos")
            self._apply_divisors(config)
        check_fields(self.path, config)
        if self.is_known:
            types = {tensor.kind.name for tensor in self._tensors.values()}
            config.dtype = torch.float32 if types == {"F32"} else torch.bfloat16
            if types <= {"F32", "F16"} and "F16" in types:
                config.dtype = torch.float16
            return config  # `load.check_fit` compares it with the tensors
        with uninterrupted(), torch.device("meta"), as_value_error(self.path):
            auto: Any = AutoModelForCausalLM
            model = auto.from_config(config)
            needed = sum(parameter.numel() for parameter in model.parameters())
            held = sum(math.prod(tensor.shape) for tensor in self._tensors.values())
            if needed > 2 * held:  # twice as many, because a tied head may be counted twice
                raise ValueError(f"its config describes {needed} weights, but it has {held}")
            self._check_names(model)
        return config

    def _check_names(self, model: Any) -> None:
        """Raise ValueError if transformers has no place for a tensor, because it would ignore the tensor."""
        import transformers.modeling_gguf_pytorch_utils as loader  # only here: it takes time

        class Qwen2MoeProcessor(loader.Qwen2MoeTensorProcessor):
            def process(self, weights: Any, name: str, **others: Any) -> Any:
                """Allow a dimension of 1, which only quantized files do without."""
                return super().process(weights.ravel() if "inp_shexp" in name else weights, name, **others)

        loader.TENSOR_PROCESSORS["qwen2moe"] = Qwen2MoeProcessor
        make: Any = loader.TENSOR_PROCESSORS.get(self.architecture, loader.TensorProcessor)
        names = loader.get_gguf_hf_weights_map(model, make())
        for name in self._tensors:
            if name not in names and name.removesuffix(".weight") not in names:  # experts have no suffix
                raise ValueError(f"it holds tensor {name!r}, which {type(model).__name__} does not have")

    def _apply_divisors(self, config: Any) -> None:
        """Set a rope whose frequencies are divided by a tensor, as llama.cpp stores Llama 3's."""
        if not self.is_known:
            if any(name.startswith(("rope_freqs", "rope_factors")) for name in self._tensors):
                raise UnsupportedModelError("its rope is scaled by tensors; use the safetensors files")
        elif DIVISORS in self._tensors:
            rope, divisors = config.rope_parameters, self._read(DIVISORS)
            if rope["rope_type"] == "yarn":
                raise UnsupportedModelError(f"it has {DIVISORS}, which is not supported with yarn")
            is_positive = bool(((divisors > 0) & divisors.isfinite()).all())
            if len(divisors) != config.head_dim // 2 or not is_positive:
                raise ValueError(f"its {DIVISORS} must hold {config.head_dim // 2} positive numbers")
            divided = {"rope_type": "divided", "divisors": (divisors * rope.get("factor", 1.0)).tolist()}
            config.rope_parameters = {"rope_theta": rope["rope_theta"], **divided}

    def is_quantized(self, name: str) -> bool:
        """Return whether a weight is quantized."""
        return name in self.headers and self._tensors[self.headers[name].name].kind.name in READERS

    def read(self, name: str) -> Tensor | Quantized:
        """Return a tensor."""
        weight: Tensor | Quantized = self._read(self.headers[name].name)
        if self.architecture == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            return self._in_halves(weight, "_kv" if "k_proj" in name else "")
        return weight

    def _read(self, name: str) -> Any:
        """Return a tensor by its own name: quantized, as the file's floats, or dequantized to float32."""
        kind, shape, start, num_bytes = self._tensors[name]
        data = np.frombuffer(self._data, np.uint8, num_bytes, start).copy()
        if kind.name in FLOATS:
            return torch.from_numpy(data).view(FLOATS[kind.name]).view(shape)
        if kind.name in READERS:
            return READERS[kind.name](torch.from_numpy(data).view(shape[0], -1, GGML_QUANT_SIZES[kind][1]))
        try:
            return torch.from_numpy(dequantize(data.reshape(*shape[:-1], -1), kind))
        except NotImplementedError:
            raise ValueError(f"{self.path}: gguf cannot read {kind.name}, the type of {name!r}") from None

    def _in_halves(self, weight: Tensor | Quantized, kind: str) -> Tensor | Quantized:
        """Return the rows of Q's or K's weight in transformers' order.

        Rope rotates dimensions i and i + D / 2 together in transformers, but 2 i and 2 i + 1 in llama.cpp.
        """
        num_rows = len(weight.integers if isinstance(weight, Quantized) else weight)
        heads = self._model.number(f"attention.head_count{kind}", self._model.number("attention.head_count"))
        rows = torch.arange(num_rows).view(heads, -1, 2).transpose(1, 2).flatten()
        if isinstance(weight, Quantized):
            integers, scales, zeros, bits = weight
            return Quantized(integers[rows], scales[rows], None if zeros is None else zeros[rows], bits)
        return weight[rows]


def _version(stat: os.stat_result) -> tuple[int, ...]:
    """Return what differs between a file and another one that replaces it."""
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def saved_name(name: str) -> str:
    """Return Hugging Face's name for a tensor.

    >>> saved_name("blk.3.ffn_down.weight")
    'model.layers.3.mlp.down_proj.weight'
    """
    place, _, end = name.rpartition(".")
    if match := re.fullmatch(r"blk\.([0-9]+)\.(.+)", place):
        return f"model.layers.{match[1]}.{OF_LAYERS.get(match[2], match[2])}.{end}"
    return f"{TENSORS.get(place, place)}.{end}"


# ---- Blocks of integers --------------------------------------------------------------------------


def _half(two_bytes: Tensor) -> Tensor:
    """Read float16 numbers: (..., 2) uint8 to (..., 1) float32."""
    return two_bytes.contiguous().view(torch.float16).float()


def _split(octets: Tensor, bits: int, run: int) -> Tensor:
    """Split bytes into numbers of so many bits: (..., n) uint8 to (..., 8 n / bits).

    Of each `run` consecutive bytes, the lowest bits come first, then the next ones, and so on.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).unsqueeze(1)
    return (octets.reshape(*octets.shape[:-1], -1, 1, run) >> shifts & ((1 << bits) - 1)).flatten(-3)


def _weight(numbers: Tensor, middle: int, scales: Tensor, lows: Tensor | None = None) -> Quantized:
    """Return a quantized weight whose integers are numbers - middle.

    It stands for numbers * scales + lows or, without lows, for integers * scales. Shapes: numbers
    (N, blocks, inputs) in 8 bits, scales and lows (N, blocks, groups per block) float32.
    """
    integers, bits = numbers.to(torch.int8).flatten(1) - middle, 4 if middle == 8 else 8
    scales = scales.flatten(1).contiguous()
    if lows is None:
        return Quantized(integers, scales, None, bits)
    # A group with scale 0 is constant. It is stored as integers 0 with zero point -1, times its low.
    is_constant, lows = scales == 0, lows.flatten(1)
    integers.view(*scales.shape, -1)[is_constant] = 0
    zeros = torch.where(is_constant, -1.0, -lows / scales - middle)
    return Quantized(integers, torch.where(is_constant, lows, scales), zeros, bits)


def _of_eight(b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and lows of a block's eight groups: 6 bits times the block's float16."""
    first, second, rest = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales = torch.cat((first & 63, (rest & 15) | (first >> 2 & 48)), -1)
    lows = torch.cat((second & 63, (rest >> 4) | (second >> 2 & 48)), -1)
    return _half(b[..., :2]) * scales, _half(b[..., 2:4]) * -lows.float()


def _q6_k(b: Tensor) -> Quantized:
    numbers = _split(b[..., :128], 4, 64) | _split(b[..., 128:192], 2, 32) << 4
    return _weight(numbers, 32, b[..., 192:208].contiguous().view(torch.int8) * _half(b[..., 208:]))


# Type -> a function from blocks (N, blocks, bytes) uint8 to the weight. A row is a sequence of blocks. Where
# numbers have five bits, the highest ones come first in the block.
READERS: dict[str, Callable[[Tensor], Quantized]] = {
    "Q4_0": lambda b: _weight(_split(b[..., 2:], 4, 16), 8, _half(b[..., :2])),
    "Q4_1": lambda b: _weight(_split(b[..., 4:], 4, 16), 8, _half(b[..., :2]), _half(b[..., 2:4])),
    "Q5_0": lambda b: _weight(
        _split(b[..., 6:], 4, 16) | _split(b[..., 2:6], 1, 1) << 4, 16, _half(b[..., :2])
    ),
    "Q5_1": lambda b: _weight(
        _split(b[..., 8:], 4, 16) | _split(b[..., 4:8], 1, 1) << 4, 16, _half(b[..., :2]), _half(b[..., 2:4])
    ),
    "Q8_0": lambda b: _weight(b[..., 2:].contiguous().view(torch.int8), 0, _half(b[..., :2])),
    "Q4_K": lambda b: _weight(_split(b[..., 16:], 4, 32), 8, *_of_eight(b)),
    "Q5_K": lambda b: _weight(
        _split(b[..., 48:], 4, 32) | _split(b[..., 16:48], 1, 32) << 4, 16, *_of_eight(b)
    ),
    "Q6_K": _q6_k,
}
