"""Decides from a config whether a model can run on transformers' code, and applies `hf_overrides`.

hf.py runs such a model. This file is separate because hf.py's imports take a second or more. It is imported
for a config that decoder.py does not support, or that is overridden.
"""

import re
import sys
from copy import deepcopy
from typing import Any

import transformers
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from nanoengine.checkpoints.checks import UnsupportedModelError, as_value_error
from nanoengine.checkpoints.decoder_config import rope_settings

ATTENTION_TYPES = ("full_attention", "sliding_attention")  # layer types
# Types of layers with a state (models/recurrent.py), with a state and attention, and with neither.
OTHER_TYPES = (
    *("linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding", "hybrid_mamba"),
    *("attention", "moe", "mlp"),
)
ROPE = "rope_scaling", "rope_theta"  # rope fields that a config may have
# Types of models that compute attention in their own code, which hf_attention.py replaces.
OWN_ATTENTION = {
    *("bloom", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "megatron-bert", "mpt"),
    *("openai-gpt", "rembert", "xglm"),
}
ATTENTION_NAME = "nanoengine"  # the name under which hf.py registers its attention in transformers

# Multimodal models for whose text config transformers has a causal LM.
_NAMES = "aya_vision cohere2_vision exaone4_5 gemma3 gemma3n gemma4 gemma4_unified idefics3 internvl llama4 "
_NAMES += "llava llava_next llava_onevision mistral3 qwen3_5 qwen3_5_moe qwen4_exp smolvlm"
WITH_CAUSAL_LM = {*_NAMES.split()}
# Other multimodal models -> the config class of their language model, and fields to set in it. The class is a
# name, because importing it takes a second.
LANGUAGE_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4v": ("Glm4Config", {"attention_bias": True}),  # GLM-4V always has these biases
    "glm4v_moe": ("Glm4MoeConfig", {}),
    "qwen2_vl": ("Qwen2Config", {}),
    "qwen2_5_vl": ("Qwen2Config", {}),
    "qwen3_vl": ("Qwen3Config", {}),
    # This model_type tells transformers how the files store the experts.
    "qwen3_vl_moe": ("Qwen3MoeConfig", {"norm_topk_prob": True, "model_type": "qwen3_vl_moe"}),
}

# Names of the language model's tensors in a multimodal checkpoint -> names in the language model alone.
PART_NAMES = {
    r"^model\.(language_model|text_model)\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^model\.(?=(embed_tokens|layers|norm)\.)": "model.",  # the published Qwen2-VL
    r"^(language_model\.)?lm_head\.": "lm_head.",
}


def adapt(config: Any, fields: dict[str, Any], overrides: dict[str, Any]) -> tuple[Any, Any | None]:
    """Return a config with overrides applied, and that of its language model, if it is multimodal."""
    if overrides:
        fields = fields or config.to_dict()  # a GGUF file has no config.json
        if hasattr(config, "quantization_config"):  # another file may hold it
            fields = {"quantization_config": config.quantization_config, **fields}
        fields = _override(fields, deepcopy(overrides), config)  # transformers edits its argument
        with as_value_error("config.json with hf_overrides"):
            config = type(config).from_dict({**fields, "name_or_path": config.name_or_path})
    _name_causal_lm(config)
    return config, language_part(config)


def _name_causal_lm(config: Any) -> None:
    """Set the causal LM in a config that names only its body, or none that transformers has."""
    model_type, (stated,) = config.model_type, (getattr(config, "architectures", None) or [""])[:1]
    causal_lm = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, stated)
    if stated != causal_lm and (
        stated == MODEL_MAPPING_NAMES.get(model_type)
        # Mistral without windows is Llama, and transformers makes Ministral of Mistral with layer_types.
        or (stated == "MistralForCausalLM" and model_type in ("llama", "ministral"))
        or (
            stated.endswith("ForCausalLM")
            and not hasattr(config, "auto_map")
            and stated not in transformers.__all__  # type: ignore[attr-defined]
        )
    ):
        config.architectures = [causal_lm]
    text_config = config.get_text_config(decoder=True)  # an encoder-decoder has two
    if text_config.model_type == "mistral4":  # the table has a multimodal class for it
        model_class: Any = transformers.Mistral4ForCausalLM
        MODEL_FOR_CAUSAL_LM_MAPPING.register(type(text_config), model_class, exist_ok=True)


def language_part(config: Any) -> Any | None:
    """Return the config of a multimodal model's language model, or None for all other models.

    Without images, the three positions of a token of Qwen-VL or GLM-V are equal: it computes as Qwen or GLM.
    """
    part = config.get_text_config(decoder=True)  # an encoder-decoder has two
    if part is config:
        return None
    if config.model_type in LANGUAGE_PARTS:
        class_name, others = LANGUAGE_PARTS[config.model_type]
        own = "model_type", "architectures"
        fields = {name: x for name, x in part.to_dict().items() if name not in own}
        fields.setdefault("head_dim", part.hidden_size // max(1, part.num_attention_heads))
        for name in ("rope_parameters", "rope_scaling"):
            if isinstance(fields.get(name), dict):
                fields[name] = {key: x for key, x in fields[name].items() if not key.startswith("mrope")}
        part = getattr(transformers, class_name)(**others | fields)
    elif config.model_type not in WITH_CAUSAL_LM or type(part) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(part)]
    part.architectures = [model_class.__name__]
    part.tie_word_embeddings = config.tie_word_embeddings
    part.dtype = getattr(part, "dtype", None) or getattr(config, "dtype", None)
    return part


def name_in_part(name: str) -> str | None:
    """Return a tensor's name in the language model alone; None: it belongs to another part."""
    for pattern, prefix in PART_NAMES.items():
        if re.match(pattern, name):
            return re.sub(pattern, prefix, name)
    return None


def check_config(config: Any) -> None:
    """Raise UnsupportedModelError for a model whose config says that it cannot run, and say why."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError("it is an encoder-decoder; only decoder-only models are supported")
    parts = {"vision_config", "audio_config"} & {*getattr(config, "sub_configs", ())}
    if config.get_text_config() is not config or parts:
        what = "it takes images or audio"
        raise UnsupportedModelError(f"{what}, and running only its language model is not supported")
    attention_implementation(config)
    from transformers.activations import ACT2FN  # imported late: it takes a second

    is_llama4 = config.model_type == "llama4_text"  # `Checkpoint.max_model_len` keeps to its first chunk
    known = {*ATTENTION_TYPES, *OTHER_TYPES, *(["chunked_attention"] if is_llama4 else [])}
    unknown = set(getattr(config, "layer_types", None) or []) - known
    if unknown:
        raise UnsupportedModelError(f"layers of type {', '.join(sorted(unknown))} are not supported")
    for field in ("hidden_act", "hidden_activation", "activation_function"):
        name = getattr(config, field, None)
        if isinstance(name, str) and name not in ACT2FN:
            raise UnsupportedModelError(f"config.json's {field} {name!r} is unknown to transformers")
    # `_probe` cannot detect this, because the factor is 1 at its positions. hf.py passes Llama 4 positions.
    if getattr(config, "attn_temperature_tuning", False) and not is_llama4:
        reason = "scales queries by a token's index in the batch, not by its position"
        raise UnsupportedModelError(f"attn_temperature_tuning {reason}")
    for rope in rope_settings(config):
        if rope["rope_type"] not in ("default", *ROPE_INIT_FUNCTIONS):
            raise UnsupportedModelError(f"rope type {rope['rope_type']!r} is unknown to transformers")


def attention_implementation(config: Any) -> str:
    """Return the attn_implementation to load a model with: hf.py's, or one that is replaced afterwards."""
    if "AutoModelForCausalLM" in getattr(config, "auto_map", {}):
        return ATTENTION_NAME  # a class in the checkpoint, not known before it is loaded
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError("transformers has no causal language model for it")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if (name := model_class.__name__) not in (getattr(config, "architectures", None) or [name]):
        raise UnsupportedModelError(f"its config belongs to {name}, but its architectures name another model")
    if hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS"):
        return ATTENTION_NAME
    if config.model_type in OWN_ATTENTION:
        if not getattr(config, "is_decoder", True):
            raise UnsupportedModelError("its attention is not causal")
        return "eager"
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        return "eager"  # it has no attention
    if getattr(config, "num_attention_heads", None) is None:
        states = "stores its recurrent states in a way of its own"
        raise UnsupportedModelError(f"it has no attention, and {states}")
    raise UnsupportedModelError("its attention does not use transformers' interface and cannot be replaced")


def _override(fields: dict[str, Any], overrides: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return the fields of a config.json, which `config` was read from, with overrides merged into them."""
    fields, overrides = _with_plain_rope(fields), _with_plain_rope(overrides)
    for name, value in overrides.items():
        part = getattr(config, name, None)
        if part is None and name not in (*fields, *ROPE) and not hasattr(config, name):
            raise ValueError(f"hf_overrides has {name!r}, which is not a field of {type(config).__name__}")
        if isinstance(value, dict) and isinstance(fields.get(name), dict):
            is_config = isinstance(part, PretrainedConfig)
            value = _override(fields[name], value, part) if is_config else {**fields[name], **value}
        fields[name] = value
    return fields


def _with_plain_rope(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with rope settings written as before transformers 5, which every version reads."""
    rope = fields.get("rope_parameters")
    if not isinstance(rope, dict) or any(isinstance(one, dict) for one in rope.values()):  # per layer type
        return dict(fields)
    plain = {name: value for name, value in fields.items() if name != "rope_parameters"}
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    theta = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    return plain | theta | {"rope_scaling": scaling}
