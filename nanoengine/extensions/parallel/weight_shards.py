"""Splits a decoder's weights among processes ("ranks"). tensor_parallel.py adds the communication.

Source: Megatron-LM, https://arxiv.org/abs/1909.08053
"""

from dataclasses import dataclass, replace

from nanoengine.checkpoints.decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """Describes one rank's part of a decoder, whose heads must divide evenly among the ranks."""

    whole: DecoderConfig
    rank: int
    size: int  # number of ranks

    def __post_init__(self) -> None:
        """Check that every rank gets the same number of heads."""
        num_heads, num_kv_heads = self.whole.num_heads, self.whole.num_kv_heads
        if num_heads % self.size or (num_kv_heads % self.size and self.size % num_kv_heads):
            heads = f"{num_heads} attention heads and {num_kv_heads} key/value heads"
            raise ValueError(f"{heads} cannot be divided evenly by tensor_parallel_size={self.size}")

    @property
    def config(self) -> DecoderConfig:
        """The config of the rank's part as a smaller decoder. It does not include the communication.

        If there are fewer key/value heads than ranks, several ranks have the same head. The numbers of MLP
        neurons and vocabulary rows are rounded up. Those past the end have zero weights.
        """
        whole, size = self.whole, self.size
        return replace(
            whole,
            num_heads=whole.num_heads // size,
            num_kv_heads=max(1, whole.num_kv_heads // size),
            intermediate_size=-(-whole.intermediate_size // size),
            vocab_size=-(-whole.vocab_size // size),
        )

    def slices(self, name: str, num_dims: int) -> tuple[slice, ...]:
        """Return the rank's part of a tensor, given the tensor's name in the checkpoint."""
        whole, mine = self.whole, self.config
        first_kv_head = self.rank * whole.num_kv_heads // self.size

        def part(count: int, first: int | None = None) -> slice:
            first = self.rank * count if first is None else first
            return slice(first, first + count)

        heads = part(mine.num_heads * whole.head_dim)
        kv_heads = part(mine.num_kv_heads * whole.head_dim, first_kv_head * whole.head_dim)
        neurons, words, everything = part(mine.intermediate_size), part(mine.vocab_size), slice(None)
        by_layer = {
            **{"q_proj": (heads,), "k_proj": (kv_heads,), "v_proj": (kv_heads,)},
            **{"gate_proj": (neurons,), "up_proj": (neurons,), "embed_tokens": (words,), "lm_head": (words,)},
            **{"o_proj": (everything, heads), "down_proj": (everything, neurons)},  # their biases are whole
        }
        return by_layer.get(name.split(".")[-2], (everything,))[:num_dims]
