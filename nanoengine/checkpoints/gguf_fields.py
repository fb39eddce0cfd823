"""Translates the fields of a GGUF header to transformers' config of the model's family.

Each field of the family is applied, or changes nothing, or the file is refused by the field's name.

Source: llama.cpp's src/llama-model.cpp and src/models/, for the fields it reads and their defaults.
"""

import math
import re
from typing import Any, NamedTuple, NoReturn

import numpy as np
import transformers
from gguf import Keys
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nanoengine.checkpoints.checks import UnsupportedModelError

MAX_SIZE = 1 << 24  # of any dimension of a layer, and of the context: far above any real model's
HUGE = 1e38
PATTERN = "attention.sliding_window_pattern"
SIGMOID = 2  # the number of a router's function
RMS, NORM, EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "layer_norm_epsilon"
FFN, CONTEXT, KV_HEADS = "feed_forward_length", "context_length", "attention.head_count_kv"
WINDOW, DIMENSIONS = "attention.sliding_window", "rope.dimension_count"
SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    CONTEXT: "max_position_embeddings",
    FFN: "intermediate_size",
}


class Family(NamedTuple):
    """Describes how the config of a family differs from others."""

    config: str  # the name of the class, because importing it takes a second
    fields: dict[str, str]  # required fields in addition to SIZES -> fields of the config
    has_head_dim: bool = True  # False: a head's size is embedding_length / head_count
    rotates: str = "all"  # dimensions of a head that rope rotates: "all", "some" or "none"


# decoder.py runs the families of OWN. transformers reads the tensors of the others.
OWN = "llama", "qwen2", "qwen3"
EPS = {RMS: "rms_norm_eps"}
EXPERTS = {**EPS, "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
FAMILIES = {
    "llama": Family("LlamaConfig", EPS),
    "qwen2": Family("Qwen2Config", EPS),
    "qwen3": Family("Qwen3Config", EPS),
    "qwen2moe": Family("Qwen2MoeConfig", EXPERTS),
    "qwen3moe": Family("Qwen3MoeConfig", EXPERTS),
    "minimax-m2": Family("MiniMaxM2Config", {**EXPERTS, "expert_count": "num_local_experts"}, rotates="some"),
    "gemma2": Family("Gemma2Config", EPS),
    "gemma3": Family("Gemma3TextConfig", EPS),
    "phi3": Family("Phi3Config", EPS, rotates="some"),
    "starcoder2": Family("Starcoder2Config", {NORM: "norm_epsilon"}),
    "nemotron": Family("NemotronConfig", {NORM: "norm_eps"}, rotates="some"),
    "stablelm": Family("StableLmConfig", {NORM: "layer_norm_eps"}, has_head_dim=False, rotates="some"),
    "lfm2": Family("Lfm2Config", {RMS: "norm_eps", "shortconv.l_cache": "conv_L_cache"}),
    "falcon": Family("FalconConfig", {NORM: EPSILON, FFN: "ffn_hidden_size"}, has_head_dim=False),
    "bloom": Family(
        "BloomConfig", {NORM: EPSILON, CONTEXT: "seq_length"}, has_head_dim=False, rotates="none"
    ),
    "gpt2": Family("GPT2Config", {NORM: EPSILON, FFN: "n_inner"}, has_head_dim=False, rotates="none"),
}
# Names that llama.cpp knows. Those that this file does not read, llama.cpp reads in no family of the table,
# except those in NEUTRAL, which change nothing if they have one of the values there.
KNOWN = {
    name.removeprefix("{arch}.")
    for group in vars(Keys).values()
    for name in (vars(group).values() if isinstance(group, type) else ())
    if isinstance(name, str)
}
KNOWN |= {"rope.scale_linear", "mm.tokens_per_image", "rope.mrope_section"}  # the last two are Ollama's
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_group_count": (0, 1),
    **dict.fromkeys(("nextn_predict_layers", "expert_count", "expert_used_count"), (0,)),
}
# Ends of names -> the type of the value. Other fields that llama.cpp knows are integers.
TYPES: dict[str, type] = {
    "epsilon|freq_base|freq_base_swa|factor|softcapping|scale|scale_linear|alpha|multiplier|yarn_beta_fast"
    "|yarn_beta_slow|max_alibi_bias|clamp_kqv|swiglu_clamp_exp|swiglu_clamp_shexp": float,
    "finetuned|causal|use_parallel_residual|expert_weights_norm|norm_top_k_prob|swin_norm|dt_b_c_rms|remove_extra_whitespaces"
    "|add_(bos|eos|sep)_token|add_space_prefix": bool,
    r"scaling\.type|tensor_data_layout|ggml\.model|ggml\.pre|chat_template|general\.(architecture|name)": str,
    r"token_id|general\.(file_type|quantization_version)|split\.(no|count|tensors\.count)": int,
}
TYPE = {re.compile(rf"(.*[._])?({ends})"): kind for ends, kind in TYPES.items()}
OF_ARRAYS = {"b": bool, "f": float, "i": int, "u": int}  # NumPy's letters
IN_WORDS = {float: "a number", bool: "true or false", str: "a text", int: "an integer"}


def check_types(fields: dict[str, Any], architecture: Any) -> None:
    """Raise ValueError if a field that llama.cpp knows has a value of another type, or an array of it."""
    for name, value in fields.items():
        own = name.removeprefix(f"{architecture}.")
        expected = next((kind for pattern, kind in TYPE.items() if pattern.fullmatch(name)), None)
        if own != name and own in KNOWN and own != "classifier.output_labels":
            expected = expected or int
        elif own == name and not name.startswith(("general.", "tokenizer.", "split.")):
            continue
        kind = OF_ARRAYS[value.dtype.kind] if own != name and isinstance(value, np.ndarray) else type(value)
        also = int if expected is float else bool if own == PATTERN else expected
        if expected is not None and kind not in (expected, also):
            raise ValueError(f"its {name} must be {IN_WORDS[expected]}, got {value!r:.99}")


class ModelFields:
    """Reads the fields of the model's family from a header, and remembers which ones were read."""

    def __init__(self, fields: dict[str, Any], architecture: str, shapes: dict[str, tuple[int, ...]]) -> None:
        self.architecture, self._shapes, prefix = architecture, shapes, f"{architecture}."
        self._fields = {name.removeprefix(prefix): x for name, x in fields.items() if name.startswith(prefix)}
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, or the default if the header has none."""
        self._read.add(name)
        return self._fields.get(name, default)

    def number(self, name: str, default: float | None = None, low: float = 1, high: float = MAX_SIZE) -> Any:
        """Return a number in [low, high], an integer if `low` is one, that is the same for all layers."""
        value, kinds = self.get(name, default), (int,) if isinstance(low, int) else (int, float)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()
        if type(value) not in kinds or not low <= value <= high:
            kind = "an integer" if isinstance(low, int) else "a number"
            name = f"{self.architecture}.{name}"
            raise ValueError(f"its {name} must be {kind} from {low} to {high}, got {value!r:.99}")
        return value

    def config(self) -> Any:
        """Return transformers' config of the model, without a dtype."""
        architecture, family = self.architecture, FAMILIES.get(self.architecture)
        if family is None:
            raise UnsupportedModelError(
                f"its architecture {architecture!r} is not supported; supported: {', '.join(FAMILIES)}; "
                "use the model's safetensors files for others"
            )
        if "token_embd.weight" not in self._shapes:
            raise ValueError("it lacks tensor 'token_embd.weight'")
        values = self._sizes(family)
        if family.rotates != "none":
            values["rope_parameters"] = self._rope(values, family)
        if "expert_count" in family.fields:
            self._add_experts(values)
        self._add_windows(values)
        if architecture == "stablelm":
            values["use_qkv_bias"] = values["attention_bias"]
            values["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in self._shapes
        for name in self._fields.keys() - self._read:
            neutral = NEUTRAL.get(name)
            if name not in KNOWN if neutral is None else not np.isin(self._fields[name], neutral).all():
                self._refuse(name, "which is not supported")
        kind = "MistralConfig" if architecture == "llama" and values["sliding_window"] else family.config
        rope = values.pop("rope_parameters", None)
        config = getattr(transformers, kind)(**values)
        if rope is not None:  # set afterwards, because Phi-3's class refuses types that its code computes
            config.rope_parameters = rope
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        return config

    def _refuse(self, name: str, reason: str) -> NoReturn:
        value = self._fields.get(name)
        raise UnsupportedModelError(
            f"its {self.architecture}.{name} is {value!r:.99}, {reason}; use the model's safetensors files"
        )

    def _sizes(self, family: Family) -> dict[str, Any]:
        """Return the fields of the config that do not depend on the kinds of layers."""
        fields, has, values = SIZES | family.fields, self._shapes.__contains__, dict[str, Any]()
        if "expert_count" in fields:  # every layer has experts
            del fields[FFN]
        for ours, theirs in fields.items():
            low, high = (0.0, 1.0) if "epsilon" in ours else (1, MAX_SIZE)
            values[theirs] = self.number(ours, None, low, high)
        num_heads = values["num_attention_heads"]
        head_dim = values["hidden_size"] // num_heads
        if family.has_head_dim:
            values["head_dim"] = head_dim = self.number("attention.key_length", head_dim, 2)
        if self.architecture == "lfm2":  # a layer without KV heads has no attention
            heads = np.broadcast_to(self.get(KV_HEADS, num_heads), values["num_hidden_layers"])
            values["layer_types"] = ["full_attention" if count else "conv" for count in heads.tolist()]
            values["block_auto_adjust_ff_dim"], self._fields[KV_HEADS] = False, heads[heads != 0]
        num_kv_heads = self.number(KV_HEADS, num_heads)
        if head_dim < 2 or head_dim % 2 or num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} heads of {head_dim} on {num_kv_heads} KV heads are not possible")
        ends = "key_length", "value_length", "key_length_swa", "value_length_swa"
        required = dict.fromkeys([f"attention.{end}" for end in (*ends, "head_dim")], head_dim)
        if family.rotates == "all":
            required |= dict.fromkeys((DIMENSIONS, f"{DIMENSIONS}_swa"), head_dim)
        if self.architecture == "bloom":
            required[FFN] = 4 * values["hidden_size"]
        if not family.has_head_dim and self.architecture != "stablelm":
            required[KV_HEADS] = 1 if self.architecture == "falcon" else num_heads
        for name, expected in required.items():
            if np.any(self.get(name, expected) != expected):
                self._refuse(name, f"only {expected} is supported")
        return values | {
            "num_key_value_heads": num_kv_heads,
            "vocab_size": self._shapes["token_embd.weight"][0],
            "tie_word_embeddings": not has("output.weight"),
            "attention_bias": has("blk.0.attn_q.bias"),
            "mlp_bias": has("blk.0.ffn_up.bias"),
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        }

    def _rope(self, values: dict[str, Any], family: Family) -> dict[str, Any]:
        number, kind = self.number, self.get("rope.scaling.type", "linear")
        theta = float(number("rope.freq_base", 1e4, 2.0, HUGE))
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
        if family.rotates == "some":
            head_dim = values.get("head_dim", values["hidden_size"] // values["num_attention_heads"])
            rope["partial_rotary_factor"] = number(DIMENSIONS, head_dim, 2, head_dim) / head_dim
        factor = float(number("rope.scaling.factor", self.get("rope.scale_linear", 0.0), 0.0, HUGE)) or 1.0
        original = number("rope.scaling.original_context_length", 0, 0) or values["max_position_embeddings"]
        scale = float(number("rope.scaling.attn_factor", 1.0, 0.0, HUGE))
        if kind == "yarn":
            rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
            for name in ("beta_fast", "beta_slow"):
                if (value := self.get(f"rope.scaling.yarn_{name}")) is not None:
                    rope[name] = float(value)
            stated = float(number("rope.scaling.yarn_attn_factor", 0.0, 0.0, HUGE))
            rope["attention_factor"] = scale * (stated or 1.0 + 0.1 * math.log(max(1.0, factor)))
        elif kind not in ("none", "linear"):
            self._refuse("rope.scaling.type", "only none, linear and yarn are supported")
        elif scale != 1.0:
            self._refuse("rope.scaling.attn_factor", "which is only supported with yarn")
        elif kind == "linear" and factor != 1.0:
            rope |= {"rope_type": "linear", "factor": factor}
        if self.architecture == "gemma3":  # Ollama has a name of its own
            base = number("rope.freq_base_swa", self.get("rope.local.freq_base", 1e4), 2.0, HUGE)
            local = {"rope_type": "default", "rope_theta": float(base)}
            return {"full_attention": rope, "sliding_attention": local}
        if self.architecture == "gemma2" and number("rope.freq_base_swa", theta, 2.0, HUGE) != theta:
            self._refuse("rope.freq_base_swa", "which must equal rope.freq_base")
        return rope

    def _add_experts(self, values: dict[str, Any]) -> None:
        """Add the sizes of experts, which some files only state by the shapes of tensors."""
        for kind, ours, theirs in (
            ("exps", "expert_feed_forward_length", "moe_intermediate_size"),
            ("shexp", "expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
        ):
            shape = self._shapes.get(f"blk.0.ffn_down_{kind}.weight")
            if kind == "exps" or self.architecture == "qwen2moe":
                values[theirs] = self.number(ours, None if shape is None else shape[-1])
        values["intermediate_size"] = values["moe_intermediate_size"]
        if self.architecture == "qwen3moe":
            values["norm_topk_prob"] = self.get("norm_top_k_prob", True)  # Ollama's
        if self.architecture == "minimax-m2" and self.get("expert_gating_func", SIGMOID) != SIGMOID:
            self._refuse("expert_gating_func", f"only {SIGMOID} (sigmoid) is supported")

    def _add_windows(self, values: dict[str, Any]) -> None:
        """Add windows and other settings of attention."""
        architecture, layers = self.architecture, values["num_hidden_layers"]
        if architecture in ("llama", "phi3", "starcoder2"):
            values["sliding_window"] = self.number(WINDOW, 0, 0) or None
        elif architecture == "lfm2" and 0 < self.number(WINDOW, 0, 0) < values["max_position_embeddings"]:
            self._refuse(WINDOW, "only full attention is supported")
        elif architecture in ("gemma2", "gemma3"):
            is_second = architecture == "gemma2"
            window = self.number(WINDOW, 4096 if is_second else 0, 0)
            pattern = self.get(PATTERN, 2 if is_second else 6)
            if type(pattern) is int:  # the last of as many layers has full attention
                pattern = np.array([pattern == 0 or (i + 1) % pattern for i in range(layers)], bool)
            if np.shape(pattern) != (layers,):
                raise ValueError(f"its {architecture}.{PATTERN} has not {layers} values")
            kinds = ["sliding_attention" if slides and window else "full_attention" for slides in pattern]
            values |= {"sliding_window": window or values["max_position_embeddings"], "layer_types": kinds}
            heads = values["hidden_size"] // values["num_attention_heads"]
            is_27b = layers == (46 if is_second else 62)
            values["query_pre_attn_scalar"] = heads if is_27b else values["head_dim"]
            for name, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
                if is_second or name.startswith("final"):
                    values[name] = self.number(name, default if is_second else 0.0, 0.0, HUGE) or None
