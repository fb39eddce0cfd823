"""The decoder: Llama, Mistral, Qwen2 and Qwen3 in one readable module.

A flat batch goes in, and hidden states come out. There is no padding, no batch dimension and no scheduling.
Shape letters: T tokens in the batch, E hidden size, H query heads, K key/value heads, D head_dim.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanoengine.backends.kv_cache import KVCache, KVSpec
from nanoengine.backends.paged_attention import PagedAttention
from nanoengine.checkpoints.decoder_config import DecoderConfig

Rope = tuple[Tensor, Tensor]  # cos and sin of each token's angles, (T, 1, D) each
Weights = tuple[Tensor | None, Tensor | None]  # of the norms of Q's and K's heads, (D,); None: no norm

# ---- Rotary position embedding ------------------------------------------------------------------


def rope_frequencies(rope: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Return the inverse frequencies, (D / 2,) float32, and the factor that scales cos and sin.

    transformers computes scaled ones: position interpolation, https://arxiv.org/abs/2306.15595; YaRN,
    https://arxiv.org/abs/2309.00071; Llama 3.1's. RoPE: https://arxiv.org/abs/2104.09864
    """
    if (scaled := ROPE_INIT_FUNCTIONS.get(rope["rope_type"])) is not None:
        fields: dict[str, Any] = {"rope_parameters": rope, "hidden_size": head_dim, "num_attention_heads": 1}
        fields["max_position_embeddings"] = 1  # not used: the rope has its own number
        return scaled(PreTrainedConfig(**fields), torch.device("cpu"))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    divisors = torch.tensor(rope.get("divisors", 1.0), device="cpu")
    return 1.0 / rope["rope_theta"] ** exponents / divisors, 1.0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head of x (T, heads, D) by the angles of its token. cos and sin are (T, 1, D)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


# ---- Element-wise parts --------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, with x's shape and dtype. Computes in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


class PlainKernels:
    """Computes the element-wise operations in PyTorch. A device may replace them with fused kernels."""

    @staticmethod
    def rms_norm(
        x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, (T, E), and the sum itself. Without a residual the sum is x."""
        total = x if residual is None else x + residual
        return rms_norm(total, weight, eps), total

    @staticmethod
    def norm_rotate_both(
        q: Tensor, k: Tensor, v: Tensor, weights: Weights, eps: float, rope: Rope, **where: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalize the heads of q and k (T, .., D) if weights are given, rotate them, and return q, k, v.

        A kernel that can write K and V to the cache finds the step's `attention` and the layer's `cache` in
        `where`. It then returns the cache's K and V.
        """
        both = zip((q, k), weights, strict=True)
        q, k = (x if weight is None else rms_norm(x, weight, eps) for x, weight in both)
        return rotate(q, *rope), rotate(k, *rope), v

    @staticmethod
    def silu_and_mul(gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, (T, I), for gate_up (T, 2 I)."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


# ---- Layers -------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """Applies `rms_norm` with a learned weight. It never writes in place, because x is also the residual."""

    kernels: Any = PlainKernels

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, (T, E), and the sum, which is the next residual."""
        return self.kernels.rms_norm(x, self.weight, self.eps, residual)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Computes one layer's self-attention, with one fused projection for queries, keys and values."""

    kernels: Any = PlainKernels

    def __init__(self, config: DecoderConfig, window: int | None) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.sizes = [config.num_heads * config.head_dim] + [config.num_kv_heads * config.head_dim] * 2
        self.window = window
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=config.qkv_bias)
        self.o_proj = nn.Linear(self.sizes[0], config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rope: Rope, cache: KVCache, attention: PagedAttention) -> Tensor:
        """Attend for a step's tokens: (T, E) -> (T, E)."""
        qkv = self.qkv_proj(x).split(self.sizes, dim=-1)
        q, k, v = (part.view(len(x), -1, self.head_dim) for part in qkv)
        q_weight, k_weight = (None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm))
        eps = 0.0 if self.q_norm is None else self.q_norm.eps
        of_heads = (q_weight, k_weight), eps, rope
        q, k, v = self.kernels.norm_rotate_both(q, k, v, *of_heads, attention=attention, cache=cache)
        out = attention(q, k, v, cache, scale=self.head_dim**-0.5, window=self.window)
        return self.o_proj(out.flatten(1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Computes down(silu(gate(x)) * up(x)), with gate and up fused into one projection."""

    kernels: Any = PlainKernels

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP: (T, E) -> (T, E)."""
        return self.down_proj(self.kernels.silu_and_mul(self.gate_up_proj(x)))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Applies attention and the MLP, each after a norm and with a residual connection."""

    def __init__(self, config: DecoderConfig, window: int | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, window)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, residual: Tensor | None, rope: Rope, cache: KVCache, attention: PagedAttention
    ) -> tuple[Tensor, Tensor]:
        """Return this layer's output and the residual, (T, E) each, not yet added.

        x is the previous layer's output, and residual the sum of everything before that (None in the first
        layer). The addition is left to the next norm, because both together take one pass over memory.
        """
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, rope, cache, attention)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """The whole model. Parameters have Hugging Face's names without `model.`, except for the fused layers."""

    code = "nanoengine's"  # shown to the user: which implementation runs the model
    replaceable = True  # a device may replace the element-wise operations with faster ones
    capturable = True  # a forward pass never waits for the device, so a CUDA graph can capture it
    kernels: Any = PlainKernels

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        # nn.Embedding would initialize its weight at random. On a meta device that imports PyTorch's
        # compiler, which takes a second.
        numbers = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=numbers)
        self.layers = nn.ModuleList(DecoderLayer(config, window) for window in config.windows)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        # A plain attribute instead of a buffer, so that it stays float32 when the model's dtype changes.
        self.rope_table: tuple[Tensor, Tensor] | None = None

    @property
    def kv_specs(self) -> list[KVSpec]:
        """The K and V that each layer stores per token."""
        shape = self.config.num_kv_heads, self.config.head_dim, self.config.head_dim
        return [KVSpec(*shape, self.norm.weight.dtype, window) for window in self.config.windows]

    @property
    def attention_settings(self) -> frozenset[str]:
        """The settings, other than a scale, that the layers pass to attention."""
        has_windows = any(window is not None for window in self.config.windows)
        return frozenset(["window"] if has_windows else [])

    def use_kernels(self, kernels: Any) -> None:
        """Use these kernels for the element-wise operations. They match `PlainKernels` up to rounding."""
        self.kernels = kernels
        for module in self.modules():
            if isinstance(module, RMSNorm | Attention | MLP):
                module.kernels = kernels

    def build_rope_table(self, num_positions: int, device: torch.device) -> None:
        """Compute cos and sin for positions [0, num_positions), each (num_positions, 1, D) float32."""
        rope = self.config.rope
        try:
            inv_freq, factor = rope_frequencies(rope, self.config.head_dim)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"the rope settings {rope!r:.200} cannot be used: {error!r}") from error
        angles = torch.outer(torch.arange(num_positions).float(), inv_freq).repeat(1, 2).unsqueeze(1)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        if not cos.isfinite().all():
            raise ValueError(f"the rope settings {rope!r:.200} give angles that are not finite")
        self.rope_table = cos.to(device), sin.to(device)

    def forward(
        self, input_ids: Tensor, positions: Tensor, caches: Sequence[KVCache], attention: PagedAttention
    ) -> Tensor:
        """Return the hidden states, (T, E), and write K and V to the caches.

        input_ids and positions are (T,) int64.
        """
        assert self.rope_table is not None, "call build_rope_table first"
        x = self.embed_tokens(input_ids)
        cos, sin = (table[positions].to(x.dtype) for table in self.rope_table)
        residual = None
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual = layer(x, residual, (cos, sin), cache, attention)
        return self.norm(x, residual)[0]  # type: ignore[no-any-return]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of R tokens: (R, E) -> (R, vocab_size)."""
        return self.lm_head(hidden)  # type: ignore[no-any-return]
