"""Replaces the attention of transformers models that compute it in their own code.

These models do not call a registered attention function. The methods here replace theirs: they compute the
same, but call paged attention instead of computing scores, a mask and a softmax. hf.py gives each module
`paged.attend`, which the methods call with q, k and v.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanoengine.checkpoints.hf_config import OWN_ATTENTION


def _attend(module: Any, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
    """Return paged attention, (1, H, T, D), for q (1, H, T, D), k and v (1, K, T, D)."""
    # Some models convert keys to float32, but the cache has the model's dtype.
    q, k, v = (x[0].transpose(0, 1).to(v.dtype) for x in (q, k, v))
    out: Tensor = module.paged.attend(q, k, v, **{"scale": q.shape[2] ** -0.5, **settings})
    return out.transpose(0, 1).unsqueeze(0)


def _split(x: Tensor, num_heads: int) -> Tensor:
    """Split heads: (1, T, H * D) -> (1, H, T, D)."""
    return x.view(*x.shape[:2], num_heads, -1).transpose(1, 2)


def _merge(x: Tensor) -> Tensor:
    """Merge heads: (1, H, T, D) -> (1, T, H * D)."""
    return x.transpose(1, 2).flatten(2)


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> Tensor:
    """Return how much each head's scores drop per position between query and key, (H,) float32.

    The slopes are a geometric series down to 2^-max_bias. If num_heads is not a power of two, the series is
    that of the next power of two: every second slope comes first, then as many of the others as needed.
    Source: ALiBi, https://arxiv.org/abs/2108.12409

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    >>> alibi_slopes(3).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    num_powers = 1 << (num_heads - 1).bit_length()
    slopes = 2.0 ** (torch.arange(1, num_powers + 1) * (-max_bias / num_powers))
    return slopes if num_powers == num_heads else torch.cat((slopes[1::2], slopes[::2]))[:num_heads]


def _slopes_of(module: Any, num_heads: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Return a layer's slopes. They are made once, because a CUDA graph reads them at a fixed address."""
    if not hasattr(module, "alibi_slopes"):
        slopes = alibi_slopes(num_heads).to(dtype).float() * scale
        module.register_buffer("alibi_slopes", slopes.to(next(module.parameters()).device), persistent=False)
    result: Tensor = module.alibi_slopes
    return result


def _attn(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
    return _attend(self, query, key, value), None


def _gpt_neo_attn(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
    window = self.config.window_size if self.attention_type == "local" else None
    return _attend(self, query, key, value, scale=1.0, window=window), None


def _openai_attn(self: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> list[Tensor]:
    return [_attend(self, q, k.transpose(2, 3), v, scale=v.shape[-1] ** -0.5 if self.scale else 1.0)]


def _bert_attention(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    layers = self.query, self.key, self.value
    q, k, v = (_split(layer(hidden_states), self.num_attention_heads) for layer in layers)
    return _merge(_attend(self, q, k, v)), None


def _xglm_attention(self: Any, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
    layers = self.q_proj, self.k_proj, self.v_proj
    q, k, v = (_split(layer(hidden_states), self.num_heads) for layer in layers)
    return self.out_proj(_merge(_attend(self, q, k, v))), None


def _bloom_attention(self: Any, hidden_states: Tensor, residual: Tensor, **_: Any) -> tuple[Tensor, None]:
    q, k, v = self._reshape(self.query_key_value(hidden_states))
    out = _attend(self, q, k, v, alibi_slopes=_slopes_of(self, self.num_heads))
    return residual + self.dense(_merge(out)), None


def _falcon_attention(
    self: Any, hidden_states: Tensor, alibi: Tensor | None, position_embeddings: Any, **_: Any
) -> tuple[Tensor, None]:
    from transformers.models.falcon import modeling_falcon

    rotate: Any = modeling_falcon.apply_rotary_pos_emb
    q, k, v = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
    if self.new_decoder_architecture:  # _split_heads repeated the heads of K and V
        k, v = (x[:, :: self.num_heads // self.num_kv_heads] for x in (k, v))
    if alibi is None:
        q, k = rotate(q, k, *position_embeddings)
        out = _attend(self, q, k, v)
    else:
        slopes = _slopes_of(self, self.num_heads, torch.bfloat16, self.inv_norm_factor)
        out = _attend(self, q, k, v, alibi_slopes=slopes)
    return self.dense(_merge(out)), None


def _mpt_attention(self: Any, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(-self.clip_qkv, self.clip_qkv)
    q, k, v = (_split(x, self.n_heads) for x in qkv.chunk(3, dim=2))
    out = _attend(self, q, k, v, scale=self.softmax_scale, alibi_slopes=_slopes_of(self, self.n_heads))
    return self.out_proj(_merge(out)), None


def _mpt_body(self: Any, input_ids: Tensor, **_: Any) -> tuple[Tensor]:
    """Run the model's body without building the biases and the mask that the original builds in each pass."""
    hidden = self.wte(input_ids)
    for block in self.blocks:
        hidden = block(hidden, position_bias=None, attention_mask=None)[0]
    return (self.norm_f(hidden),)


# model_type -> the methods to replace: "class.method" -> the replacement.
METHODS: dict[str, dict[str, Callable[..., Any]]] = {
    "bloom": {"BloomAttention.forward": _bloom_attention},
    "codegen": {"CodeGenAttention._attn": _attn},
    "falcon": {"FalconAttention.forward": _falcon_attention},
    "gpt_neo": {"GPTNeoSelfAttention._attn": _gpt_neo_attn},
    "gpt_neox_japanese": {"GPTNeoXJapaneseAttention._attn": _attn},
    "gptj": {"GPTJAttention._attn": _attn},
    "megatron-bert": {"MegatronBertSelfAttention.forward": _bert_attention},
    "mpt": {"MptAttention.forward": _mpt_attention, "MptModel.forward": _mpt_body},
    "openai-gpt": {"Attention._attn": _openai_attn},
    "rembert": {"RemBertSelfAttention.forward": _bert_attention},
    "xglm": {"XGLMAttention.forward": _xglm_attention},
}
assert METHODS.keys() == OWN_ATTENTION


def replace_attention(causal_lm: Any) -> None:
    """Replace the methods listed for the model's type, in this model's modules only."""
    for name, method in METHODS.get(causal_lm.config.model_type, {}).items():
        class_name, method_name = name.split(".")
        modules = [module for module in causal_lm.modules() if type(module).__name__ == class_name]
        paged = type(class_name, (type(modules[0]),), {method_name: method})
        for module in modules:
            module.__class__ = paged
