"""Reads what decoder.py needs from a transformers config: one dataclass for all supported families."""

from dataclasses import dataclass
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ARCHITECTURES = {  # the supported ones, by model_type
    family.lower(): f"{family}ForCausalLM" for family in ("Llama", "Mistral", "Ministral", "Qwen2", "Qwen3")
}
SAME_NAMES = "vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps"  # in both configs
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Holds the settings in which checkpoints of the supported families differ."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: dict[str, Any]  # rope_type, rope_theta, and the fields this rope_type needs
    windows: tuple[int | None, ...]  # sliding window per layer, in tokens; None: full attention
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @classmethod
    def from_hf(cls, config: Any) -> "DecoderConfig":
        """Translate a transformers config. Raises ValueError for what is not supported."""
        architecture = architecture_of(config)
        if architecture not in (names := ARCHITECTURES.values()):
            raise ValueError(f"architecture {architecture!r} is not supported; supported: {', '.join(names)}")
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act {config.hidden_act!r} is not supported; supported: silu")
        family = architecture.removesuffix("ForCausalLM")
        if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type) != architecture:
            raise ValueError(f"model_type {config.model_type!r} does not belong to {architecture}")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        attention_bias = bool(getattr(config, "attention_bias", False))
        window = None if family == "Llama" else getattr(config, "sliding_window", None)  # Llama has none
        layer_types = getattr(config, "layer_types", None)
        if layer_types is None:
            layer_types = ["sliding_attention"] * config.num_hidden_layers
        return cls(
            **{name: getattr(config, name) for name in SAME_NAMES},
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=head_dim,
            rope=_rope_parameters(config),
            windows=tuple(window if kind == "sliding_attention" else None for kind in layer_types),
            tie_word_embeddings=bool(config.tie_word_embeddings),
            qkv_bias=family == "Qwen2" or attention_bias,
            o_bias=attention_bias and family != "Qwen2",
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=family == "Qwen3",
        )


def architecture_of(config: Any) -> str:
    """Return the architecture that a transformers config names, or else the one its class implies."""
    by_class = type(config).__name__.removesuffix("Config") + "ForCausalLM"
    return (getattr(config, "architectures", None) or [by_class])[0]  # type: ignore[no-any-return]


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """Return a config's rope settings, each with its rope_type: none, one, or one per layer type."""
    # Before transformers 5 the field is `rope_scaling`. Old checkpoints call the rope_type `type`.
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(rope, dict):
        return []
    nested = [value for value in rope.values() if isinstance(value, dict)]
    whole = [rope] if not nested or {"rope_type", "type"} & rope.keys() else []
    return [{"rope_type": one.get("type", "default"), **one} for one in whole + nested]


def _rope_parameters(config: Any) -> dict[str, Any]:
    """Return the rope setting of a supported family, with the defaults of its rope_type filled in."""
    rope = (rope_settings(config) or [{"rope_type": "default"}])[0]
    rope.setdefault("rope_theta", getattr(config, "rope_theta", 10000.0))
    if rope["rope_type"] not in SUPPORTED_ROPE_TYPES and "divisors" not in rope:  # gguf.py sets divisors
        supported = ", ".join(SUPPORTED_ROPE_TYPES)
        raise ValueError(f"rope type {rope['rope_type']!r} is not supported; supported: {supported}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor {rope['partial_rotary_factor']} is not supported, only 1.0")
    if rope["rope_type"] in ("llama3", "yarn") and rope.get("original_max_position_embeddings") is None:
        rope["original_max_position_embeddings"] = config.max_position_embeddings
    if rope["rope_type"] == "yarn" and rope.get("factor") is None:
        rope["factor"] = config.max_position_embeddings / rope["original_max_position_embeddings"]
    return rope
