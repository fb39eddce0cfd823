"""GGUF files, llama.cpp's: a model's config, its weights and its tokenizer in one.

Of the families of `decoder.py` config and weights are read here, and integers stay integers; of others all is
transformers' to read. Sources: ggml's docs/gguf.md; gguf-py/gguf/quants.py and constants.py for the layouts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor

from nanoengine.backends.quantized import Quantized, floats
from nanoengine.models.files import TensorHeader
from nanoengine.models.hf_config import UnsupportedModelError

# Configs by name: any one of them takes transformers a second of imports.
FAMILIES = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
OF_LAYERS = {  # behind "blk.0." and "model.layers.0."
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
DIVISORS = "rope_freqs.weight"  # of rotary frequencies, a tensor


class GGUFFile:
    """A model's file.

    Raises:
        ValueError: it is damaged, of several files, or the package gguf is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError:
            raise ValueError(f"{path} needs the package gguf: pip install 'nanoengine[quantized]'") from None
        self.path, self._dequantize = path, gguf.quants.dequantize
        try:
            reader = gguf.GGUFReader(path)
            self.fields = {name: field.contents() for name, field in reader.fields.items() if name[0] != "t"}
            tokens = reader.fields.get("tokenizer.ggml.tokens")
            self.num_tokens = len(tokens.data) if tokens is not None else 0
            for name in ("bos", "eos", "eot"):
                field = reader.fields.get(f"tokenizer.ggml.{name}_token_id")
                self.fields[f"{name}_token_id"] = None if field is None else field.contents()
        except Exception as error:  # whatever comes of bytes that are something else
            raise ValueError(f"{path} is damaged or not a GGUF file: {error}") from error
        if self.fields.get("split.count", 0) > 1:
            raise ValueError(f"{path} is one of several files; join them by llama-gguf-split --merge")
        self.architecture = str(self.fields.get("general.architecture"))
        self.is_known = self.architecture in FAMILIES and not self._number("expert_count", 0)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.headers: dict[str, TensorHeader] = {}
        for own_name, tensor in self._tensors.items():
            if own_name != DIVISORS:
                name, shape = saved_name(own_name), tuple(int(size) for size in reversed(tensor.shape))
                self.headers[name] = TensorHeader(path, own_name, "F32", shape)

    def _number(self, name: str, default: float | None = None) -> Any:
        value = self.fields.get(f"{self.architecture}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.path}: {self.architecture}.{name} must be a number, got {value!r}")
        return value

    def config(self) -> Any:
        """Of a known family, as transformers has it.

        Raises:
            ValueError: a field is missing.
            UnsupportedModelError: what it asks for is not served.
        """
        number, hidden_size = self._number, self._number("embedding_length")
        num_heads = number("attention.head_count")
        head_dim = number("attention.key_length", hidden_size // num_heads)
        for name in ("attention.value_length", "rope.dimension_count"):
            if number(name, head_dim) != head_dim:
                raise UnsupportedModelError(f"its {name} is not its head_dim, {head_dim}")
        if number("attention.sliding_window", 0):
            raise UnsupportedModelError("its file has sliding windows, and does not say in which layers")
        config = getattr(transformers, FAMILIES[self.architecture])(
            vocab_size=self.headers["model.embed_tokens.weight"].shape[0],  # type: ignore[index]
            hidden_size=hidden_size,
            intermediate_size=number("feed_forward_length"),
            num_hidden_layers=number("block_count"),
            num_attention_heads=num_heads,
            num_key_value_heads=number("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_position_embeddings=number("context_length"),
            rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
            tie_word_embeddings="lm_head.weight" not in self.headers,
            attention_bias="model.layers.0.self_attn.q_proj.bias" in self.headers,
            mlp_bias="model.layers.0.mlp.gate_proj.bias" in self.headers,
            bos_token_id=self.fields["bos_token_id"],
            eos_token_id=[i for name in ("eos", "eot") if (i := self.fields[f"{name}_token_id"]) is not None],
        )
        config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
        config.rope_parameters = self._rope(head_dim)
        types = {tensor.tensor_type.name for tensor in self._tensors.values()}
        config.dtype = torch.float32 if types == {"F32"} else torch.bfloat16
        if types <= {"F32", "F16"} and "F16" in types:
            config.dtype = torch.float16
        return config

    def _rope(self, head_dim: int) -> dict[str, Any]:
        rope = {"rope_type": "default", "rope_theta": float(self._number("rope.freq_base", 10000.0))}
        if DIVISORS in self._tensors:
            divisors = self._tensors[DIVISORS].data.tolist()
            if len(divisors) != head_dim // 2:
                raise ValueError(f"{self.path}: {DIVISORS} has {len(divisors)} numbers, not {head_dim // 2}")
            return rope | {"rope_type": "divided", "divisors": divisors}
        kind = self.fields.get(f"{self.architecture}.rope.scaling.type", "none")
        if kind == "none":
            return rope
        if kind not in ("linear", "yarn"):
            raise UnsupportedModelError(f"its rope.scaling.type is {kind!r}")
        rope |= {"rope_type": kind, "factor": float(self._number("rope.scaling.factor"))}
        if kind == "yarn":
            original = self._number("rope.scaling.original_context_length")
            rope["original_max_position_embeddings"] = int(original)
        return rope

    def check_others(self) -> None:
        """Refuse of other families what transformers would leave out without a word.

        Raises:
            UnsupportedModelError: with the reason.
        """
        if self.fields.get(f"{self.architecture}.rope.scaling.type", "none") != "none":
            raise UnsupportedModelError(
                "its rope is scaled, which transformers does not read out of this file"
            )
        if any(name.startswith(("rope_freqs", "rope_factors")) for name in self._tensors):
            raise UnsupportedModelError("its rope is scaled by tensors, which transformers does not read")

    def is_quantized(self, name: str) -> bool:
        """Whether it is a weight in few bits."""
        return name in self.headers and self._type_of(name) in READERS

    def _type_of(self, name: str) -> str:
        return str(self._tensors[self.headers[name].name].tensor_type.name)

    def read(self, name: str, part: tuple[slice, ...] | None = None) -> Tensor | Quantized:
        """As `Files.read`."""
        header, kind = self.headers[name], self._type_of(name)
        assert header.shape is not None
        data = self._tensors[header.name].data
        weight: Tensor | Quantized
        if kind in READERS:
            layout = READERS[kind]
            rows = np.asarray(data).reshape(header.shape[0], -1, layout.num_bytes)
            weight = layout.read(torch.from_numpy(rows.copy()))
        elif kind in ("F32", "F16"):
            weight = torch.from_numpy(np.array(data)).view(header.shape)
        elif kind == "BF16":
            weight = torch.from_numpy(np.array(data)).view(torch.bfloat16).view(header.shape)
        else:
            weight = torch.from_numpy(self._dequantize(data, self._tensors[header.name].tensor_type))
        if self.architecture == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            weight = self._in_halves(weight, "_kv" if "k_proj" in name else "")
        return weight if part is None else floats(weight, torch.float32)[part]

    def _in_halves(self, weight: Tensor | Quantized, kind: str) -> Tensor | Quantized:
        """Rows in transformers' order, which turns i and i + D / 2 where llama.cpp turns 2 i and 2 i + 1."""
        num_rows = len(weight.integers if isinstance(weight, Quantized) else weight)
        heads = self._number(f"attention.head_count{kind}", self._number("attention.head_count"))
        rows = torch.arange(num_rows).view(int(heads), -1, 2).transpose(1, 2).flatten()
        if isinstance(weight, Quantized):
            integers, scales, zeros, bits = weight
            return Quantized(integers[rows], scales[rows], None if zeros is None else zeros[rows], bits)
        return weight[rows]


def saved_name(name: str) -> str:
    """What Hugging Face calls a tensor.

    >>> saved_name("blk.3.ffn_down.weight")
    'model.layers.3.mlp.down_proj.weight'
    """
    place, _, end = name.rpartition(".")
    if place.startswith("blk."):
        _, layer, part = place.split(".", 2)
        return f"model.layers.{layer}.{OF_LAYERS.get(part, part)}.{end}"
    return f"{TENSORS.get(place, place)}.{end}"


# ---- Blocks of integers --------------------------------------------------------------------------


class Layout(NamedTuple):
    """How a type writes a row's weights: block after block."""

    num_bytes: int  # of a block
    read: Callable[[Tensor], Quantized]  # blocks (N, blocks, bytes) uint8


def _half(two_bytes: Tensor) -> Tensor:
    """(.., 2) uint8 to (.., 1) float32."""
    return two_bytes.contiguous().view(torch.float16).float()


def _nibbles(octets: Tensor) -> Tensor:
    """(.., n) uint8 to (.., 2 n): the low halves, then the high ones."""
    return torch.cat((octets & 15, octets >> 4), -1)


def _bits_of(octets: Tensor) -> Tensor:
    """(.., n) uint8 to (.., 8 n) of 0 and 1, the lowest first."""
    return (octets.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _symmetric(numbers: Tensor, scales: Tensor, bits: int) -> Quantized:
    """Integers (N, blocks, ..) times scales, (N, blocks, groups in a block)."""
    return Quantized(numbers.to(torch.int8).flatten(1), scales.flatten(1).contiguous(), None, bits)


def _affine(numbers: Tensor, scales: Tensor, lows: Tensor, middle: int) -> Quantized:
    """Numbers from 0 to 2 middle - 1, (N, groups, inputs) uint8, times scales, plus lows: (N, groups)."""
    # Without a scale a group is what it is at least: one integer times that.
    integers = torch.where((scales == 0).unsqueeze(2), 0, numbers.to(torch.int8) - middle).to(torch.int8)
    zeros = torch.where(scales == 0, -1.0, -lows / scales - middle)
    bits = 4 if middle == 8 else 8
    return Quantized(integers.flatten(1), torch.where(scales == 0, lows, scales), zeros, bits)


def _q4_0(b: Tensor) -> Quantized:
    return _symmetric(_nibbles(b[..., 2:]).char() - 8, _half(b[..., :2]), 4)


def _q4_1(b: Tensor) -> Quantized:
    return _affine(_nibbles(b[..., 4:]), _half(b[..., :2]).squeeze(2), _half(b[..., 2:4]).squeeze(2), 8)


def _q5_0(b: Tensor) -> Quantized:
    return _symmetric((_nibbles(b[..., 6:]) | _bits_of(b[..., 2:6]) << 4).char() - 16, _half(b[..., :2]), 8)


def _q5_1(b: Tensor) -> Quantized:
    numbers = _nibbles(b[..., 8:]) | _bits_of(b[..., 4:8]) << 4
    return _affine(numbers, _half(b[..., :2]).squeeze(2), _half(b[..., 2:4]).squeeze(2), 16)


def _q8_0(b: Tensor) -> Quantized:
    return _symmetric(b[..., 2:].contiguous().view(torch.int8), _half(b[..., :2]), 8)


def _of_eight(b: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and lows of eight groups, 6 bits each, times the block's own two: (N, groups)."""
    first, second, rest = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales = torch.cat((first & 63, (rest & 15) | (first >> 2 & 48)), -1)
    lows = torch.cat((second & 63, (rest >> 4) | (second >> 2 & 48)), -1)
    return (_half(b[..., :2]) * scales).flatten(1), (_half(b[..., 2:4]) * -lows.float()).flatten(1)


def _in_fours(octets: Tensor) -> Tensor:
    """Four times 32 octets, whose halves are two groups: (N, blocks, 128) to (N, groups, 32)."""
    return _nibbles(octets.reshape(*octets.shape[:2], 4, 32)).view(len(octets), -1, 32)


def _q4_k(b: Tensor) -> Quantized:
    return _affine(_in_fours(b[..., 16:]), *_of_eight(b), 8)


def _q5_k(b: Tensor) -> Quantized:
    fifth = b[..., 16:48].unsqueeze(2) >> torch.arange(8, dtype=torch.uint8).unsqueeze(1) & 1
    return _affine(_in_fours(b[..., 48:]) | fifth.view(len(b), -1, 32) << 4, *_of_eight(b), 16)


def _q6_k(b: Tensor) -> Quantized:
    shape = *b.shape[:2], 2, 1
    low = b[..., :128].reshape(*shape, 64) >> torch.tensor([0, 4], dtype=torch.uint8).unsqueeze(1) & 15
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).unsqueeze(1)
    high = b[..., 128:192].reshape(*shape, 32) >> shifts & 3
    numbers = low.flatten(2) | high.flatten(2) << 4
    scales = b[..., 192:208].contiguous().view(torch.int8) * _half(b[..., 208:])
    return _symmetric(numbers.char() - 32, scales, 8)


READERS = {
    "Q4_0": Layout(18, _q4_0),
    "Q4_1": Layout(20, _q4_1),
    "Q5_0": Layout(22, _q5_0),
    "Q5_1": Layout(24, _q5_1),
    "Q8_0": Layout(34, _q8_0),
    "Q4_K": Layout(144, _q4_k),
    "Q5_K": Layout(176, _q5_k),
    "Q6_K": Layout(210, _q6_k),
}
