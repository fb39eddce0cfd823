"""Builds and runs a small model of each causal type in transformers, for the guide's table of models.

python -m tests.model_table llama t5 mamba   # the outcome for these types
python -m tests.model_table --write          # of all, into docs/guide/models.md; two minutes
"""

import inspect
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nanoengine.checkpoints.checks import UnsupportedModelError
from nanoengine.checkpoints.hf_config import language_part
from tests import helpers
from tests.helpers import GEMMA, GEMMA4, TINY

PAGE = Path(__file__).parent.parent / "docs" / "guide" / "models.md"
MARKS = "<!-- models -->\n", "<!-- end of models -->\n"
TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MAX_PARAMETERS = 30_000_000
# Sizes under all names that configs use. A config is given those that it has.
SMALL: dict[str, Any] = {
    **TINY,
    **dict.fromkeys(("d_model", "n_embd", "dim"), 64),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("n_positions", "max_seq_len"), 512),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    **helpers.IN_GROUPS,
    **helpers.LATENT,
    **dict.fromkeys(("head_dim", "v_head_dim", "linear_head_dim", "mamba_head_dim", "ssm_state_size"), 16),
    **dict.fromkeys(("linear_num_heads", "mamba_num_heads"), 8),
    "chunk_size": 16,  # of a scan: prompts are padded to whole chunks
    "unpadded_vocab_size": TINY["vocab_size"],
    "is_decoder": True,
}
# Settings for models that these sizes do not fit.
ROPE = {"rope_type": "default", "rope_theta": 1e4}
SMALL_VISION = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
HYBRID = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
LINEAR = {**HYBRID, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 8}
FEW_EXPERTS = {"num_experts": 4, **helpers.MOE, "shared_expert_intermediate_size": 32}
LLAMA4: dict[str, Any] = {"num_local_experts": 4, "intermediate_size_mlp": 96, "head_dim": 16}
LLAMA4 |= {"attention_chunk_size": 128, "floor_scale": 16, "attn_scale": 0.5}
LLAMA4["no_rope_layers"] = [1, 0]  # the second scales its queries by position
WITHOUT_INPUTS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_chunk_size": 16}
ROPES = {"rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}}
CHANGES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {**helpers.ALTERNATING, **ROPES},
    "cwm": {"bos_token_id": 1, "eos_token_id": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma4_text": {"vocab_size_per_layer_input": 128},
    "codegen": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 24},
    "gptj": {"rotary_dim": 8},
    "gemma3": {"text_config": {**TINY, "head_dim": 16}, "vision_config": SMALL_VISION},
    "gemma3n": {"text_config": {**TINY, **GEMMA, **helpers.GEMMA3N}},
    "gemma4": {"text_config": {**TINY, **GEMMA, **GEMMA4, "pad_token_id": 0}, "vision_config": SMALL_VISION},
    "gemma4_unified": {"text_config": {**TINY, **GEMMA, **GEMMA4, "pad_token_id": 0}},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 128},
    "gemma4_assistant": {"text_config": {**TINY, **WITHOUT_INPUTS, "num_kv_shared_layers": 2}},
    "bloom": {"seq_length": 512},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_state": 16, **MAMBA},
    "qwen4_exp_text": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "max_position_embeddings": 512},
    "llama4_text": LLAMA4,
    "llama4": {"text_config": {**TINY, **LLAMA4}, "vision_config": SMALL_VISION},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8},
    "modernbert-decoder": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "zamba": {"num_hidden_layers": 3},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "granitemoehybrid": {**HYBRID, **MAMBA},
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1], **MAMBA},
    "jamba": {"num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1},
}
CONVOLUTIONS = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
WITH_LINEAR = "bailing_hybrid kimi_linear olmo_hybrid qwen3_5_text qwen3_5_moe_text qwen3_next"
QWEN35 = {"text_config": {**TINY, "head_dim": 16, **LINEAR, **FEW_EXPERTS}, "vision_config": SMALL_VISION}
CHANGES |= {name: CONVOLUTIONS for name in ("lfm2", "lfm2_moe", "lfm3")}
CHANGES |= {name: LINEAR for name in WITH_LINEAR.split()}
CHANGES |= {name: QWEN35 for name in ("qwen3_5", "qwen3_5_moe")}
SERVED = "`decoder.py`", "`hf.py`"
LENGTHS = [1, 13, 40, 75, 20]
NUM_NEW = 16


def small_config(model_type: str) -> Any:
    """Return a config of the type whose model has a few million parameters."""
    config_class = CONFIG_MAPPING[model_type]
    known = {*inspect.signature(config_class.__init__).parameters, *config_class.attribute_map}
    sizes = {name: value for name, value in SMALL.items() if name in known}
    if "kv_lora_rank" in known:  # latent attention has as many heads for keys as for queries
        sizes["num_key_value_heads"] = 4
    return config_class(**{**sizes, **CHANGES.get(model_type, {})})


def small_model(config: Any) -> Any:
    """Return a model with random float32 weights, the same at every call. They are wide, to avoid ties.

    Raises UnsupportedModelError if it is not small.
    """
    with torch.device("meta"):
        num_parameters = sum(x.numel() for x in AutoModelForCausalLM.from_config(config).parameters())
    if num_parameters > MAX_PARAMETERS:
        raise UnsupportedModelError("is not supported: not tested, because it cannot be made small")
    torch.manual_seed(0)
    return helpers.with_random_norms(AutoModelForCausalLM.from_config(config).eval())


def outcome(model_type: str) -> str:
    """Return `decoder.py` or `hf.py`, whichever runs the type, or the reason why it is refused.

    A type is supported if greedy tokens of five prompts equal those of transformers' generate: chunked, with
    preemptions, and once more from the prefix cache. Otherwise it has to be refused, or this raises.
    """
    with tempfile.TemporaryDirectory() as path:
        try:
            config = small_config(model_type)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"CHANGES has to say how a small {model_type} is configured: {error}") from error
        config.save_pretrained(path)
        try:
            helpers.open_checkpoint(path)  # most refusals need no model
            try:
                model = small_model(config)
                model.save_pretrained(path)
            except ImportError:  # its other parts need a library: the language model, under its names there
                model = small_model(language_part(config))
                helpers.composite_of(model, config, (r"^model\.", "model.language_model."), Path(path))
            return SERVED[helpers.check_served(Path(path), model, LENGTHS, NUM_NEW) == "transformers'"]
        except UnsupportedModelError as error:
            return str(error).partition("is not supported: ")[2]


def table(outcomes: dict[str, str]) -> str:
    """Return the types by outcome, as a Markdown table."""
    version = ".".join(transformers.__version__.split(".")[:2])
    reasons = sorted(set(outcomes.values()) - set(SERVED), key=lambda why: (why.startswith("not"), why))
    lines = [f"| code | `model_type` ({len(outcomes)} in transformers {version}) |", "|---|---|"]
    for result in (*SERVED, *reasons):
        types = ", ".join(model_type for model_type, one in outcomes.items() if one == result)
        lines.append(f"| {result if result in SERVED else f'refused: {result}'} | {types} |")
    return "\n".join(lines) + "\n"


def read_table() -> tuple[str, dict[str, str]]:
    """Return the version of transformers that the page's table is about, and its outcomes."""
    caption, _, *rows = PAGE.read_text().partition(MARKS[0])[2].partition(MARKS[1])[0].splitlines()
    outcomes = {}
    for row in rows:
        result, types = row.strip("| ").split(" | ")
        outcomes.update(dict.fromkeys(types.split(", "), result.removeprefix("refused: ")))
    return caption.partition("transformers ")[2].partition(")")[0], outcomes


def main() -> None:
    """Print outcomes, or write the table into the page."""
    torch.set_num_threads(1)  # the models are tiny
    types = [name for name in sys.argv[1:] if name != "--write"] or TYPES
    outcomes = {}
    for model_type in types:
        outcomes[model_type] = outcome(model_type)
        print(f"{model_type}: {outcomes[model_type]}", flush=True)
    if "--write" in sys.argv:
        before, _, rest = PAGE.read_text().partition(MARKS[0])
        PAGE.write_text(before + MARKS[0] + table(outcomes) + MARKS[1] + rest.partition(MARKS[1])[2])


if __name__ == "__main__":
    main()
