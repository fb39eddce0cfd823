"""Fields of GGUF headers: each changes a model as a config made by hand does, or nothing, or is refused."""

import json
import math
import re

import gguf
import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

from nanoengine import LLM
from nanoengine.checkpoints.decoder_config import DecoderConfig
from nanoengine.checkpoints.gguf import GGUFFile
from nanoengine.checkpoints.gguf_fields import OWN
from tests.checkpoints.test_quantized_formats import add_fields, close, gguf_writer, in_pairs
from tests.helpers import TINY, ask, logprobs_of, prompt_logprobs, slow, with_random_norms

SIZES = {"context_length": 512, "embedding_length": 64, "feed_forward_length": 96, "block_count": 2}
SIZES |= {"attention.head_count": 4, "attention.head_count_kv": 2}
RMS, NORM = {"attention.layer_norm_rms_epsilon": 1e-6}, {"attention.layer_norm_epsilon": 1e-5}
HEAD = {"attention.key_length": 16, "attention.value_length": 16}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": True, "num_hidden_layers": 2}
GEMMA2 = {**GEMMA, **WINDOWS}, {**RMS, **HEAD, "attention.sliding_window": 8}
ROPE = {"rope_type": "default", "partial_rotary_factor": 1.0}
BASES = {base: {**ROPE, "rope_theta": base} for base in (1e4, 1e6)}
GEMMA3_ROPE = {"full_attention": BASES[1e6], "sliding_attention": BASES[1e4]}
GEMMA3 = (
    {**GEMMA, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2, "rope_parameters": GEMMA3_ROPE},
    {**RMS, **HEAD, "rope.freq_base": 1e6, "attention.sliding_window": 8},
)
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS = {"expert_count": 4, "expert_used_count": 2}
MINIMAX = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16}
LFM2 = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "norm_eps": 1e-6}
WIDE, PLAIN = {"feed_forward_length": 256}, {"rope_parameters": BASES[1e4]}  # four times the hidden size
# family -> (class, fields of the config, fields of the header in addition to SIZES)
MODELS = {
    "llama": ("Llama", {}, RMS),
    "qwen2": ("Qwen2", {}, RMS),
    "qwen3": ("Qwen3", {"head_dim": 16}, RMS | HEAD),
    "qwen2moe": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 48}, RMS | EXPERTS),
    "qwen3moe": ("Qwen3Moe", {**MOE, "head_dim": 16, "norm_topk_prob": True}, RMS | EXPERTS | HEAD),
    "minimax-m2": ("MiniMaxM2", MINIMAX | PLAIN, RMS | EXPERTS | HEAD | {"feed_forward_length": 32}),
    "gemma2": ("Gemma2", *GEMMA2),
    "gemma3": ("Gemma3Text", *GEMMA3),
    "phi3": ("Phi3", {"rms_norm_eps": 1e-6}, RMS),
    "starcoder2": ("Starcoder2", {}, NORM),
    "nemotron": ("Nemotron", PLAIN, NORM),
    "stablelm": ("StableLm", PLAIN, NORM),
    "lfm2": ("Lfm2", LFM2 | PLAIN, RMS | {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2]}),
    "falcon": ("Falcon", {"num_kv_heads": 1}, NORM | WIDE | {"attention.head_count_kv": 1}),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}, NORM | WIDE | {"attention.head_count_kv": 4}),
    "gpt2": ("GPT2", {"n_positions": 512}, NORM | WIDE | {"attention.head_count_kv": 4}),
}


def rope(**fields):
    return {"rope_parameters": {**BASES[1e4], **fields}}


def yarn(**fields):
    return rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=128, **fields)


LINEAR = rope(rope_type="linear", factor=4.0)
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
FROM_128 = {**YARN, "rope.scaling.original_context_length": 128}
TYPED = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
UNTYPED, OLD = {"rope.scaling.factor": 4.0}, {"rope.scale_linear": 4.0}
PARTIAL = [rope(partial_rotary_factor=0.5), {"rope.dimension_count": 8}]
FULL, SLIDING = "full_attention", "sliding_attention"
PATTERN = "attention.sliding_window_pattern"
SOFTER = {**FROM_128, "rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0}
YARN_SCALE = 1 + 0.1 * math.log(4.0)  # of cos and sin


def heads(size):
    return dict.fromkeys(HEAD, size)


def layers(*kinds, **fields):
    return {"num_hidden_layers": len(kinds), "layer_types": [*kinds], **fields}


def bases(full, sliding):
    return {"rope_parameters": {FULL: BASES[1e6] | full, SLIDING: BASES[1e4] | sliding}}


SIXTY, BY_8 = [*[SLIDING] * 5, FULL] * 10, {"rope_type": "linear", "factor": 8.0}
# Changes to a family's config, and those to its header that mean the same
CASES = [
    *[(name, rope(rope_theta=123456.0), {"rope.freq_base": 123456.0}) for name in MODELS if name != "gemma3"],
    *[(name, rope(rope_type="default"), {"rope.scaling.type": "none", **UNTYPED}) for name in OWN],
    *[(name, LINEAR, x) for name in (*OWN, "gemma2", "qwen3moe", "phi3") for x in (TYPED, UNTYPED, OLD)],
    *[(name, yarn(), FROM_128) for name in (*OWN, "qwen3moe", "starcoder2")],
    *[(name, *PARTIAL) for name in ("phi3", "stablelm", "nemotron")],
    ("nemotron", {"norm_eps": 0.25}, {"attention.layer_norm_epsilon": 0.25, **RMS}),
    ("llama", rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=512), YARN),
    ("qwen3", yarn(attention_factor=1.2), {**FROM_128, "rope.scaling.yarn_attn_factor": 1.2}),
    ("qwen3", yarn(attention_factor=2 * YARN_SCALE), {**FROM_128, "rope.scaling.attn_factor": 2.0}),
    ("llama", yarn(beta_fast=8.0, beta_slow=2.0), SOFTER),
    ("qwen3", {"rms_norm_eps": 0.25}, {"attention.layer_norm_rms_epsilon": 0.25}),
    ("qwen3", {"head_dim": 32}, heads(32)),
    ("llama", {"num_key_value_heads": 1}, {"attention.head_count_kv": [1, 1]}),
    ("starcoder2", {"sliding_window": 8}, {"attention.sliding_window": 8}),
    ("starcoder2", {"norm_epsilon": 0.25}, {"attention.layer_norm_epsilon": 0.25}),
    ("phi3", {"sliding_window": 8}, {"attention.sliding_window": 8}),
    ("phi3", {"rms_norm_eps": 0.25}, {"attention.layer_norm_rms_epsilon": 0.25}),
    ("stablelm", {"layer_norm_eps": 0.25}, {"attention.layer_norm_epsilon": 0.25}),
    ("stablelm", {"use_qkv_bias": True}, {"use_parallel_residual": True}),
    ("stablelm", {"use_parallel_residual": True}, {}),
    ("gemma2", {"attn_logit_softcapping": 3.0}, {"attn_logit_softcapping": 3.0}),
    ("gemma2", {"final_logit_softcapping": 3.0}, {"final_logit_softcapping": 3.0}),
    ("gemma2", {"sliding_window": 16}, {"attention.sliding_window": 16}),
    ("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32}, heads(32)),
    ("gemma2", layers(FULL, SLIDING, SLIDING), {PATTERN: [False, True, True], "block_count": 3}),
    ("gemma2", layers(SLIDING, SLIDING, FULL), {PATTERN: 3, "block_count": 3}),
    ("gemma2", layers(*[SLIDING, FULL] * 23, head_dim=32), {"block_count": 46, **heads(32)}),
    ("gemma3", bases(BY_8, {}) | layers(SLIDING, FULL), TYPED | {"rope.scaling.factor": 8.0, PATTERN: 2}),
    ("gemma3", bases({}, {"rope_theta": 500.0}), {"rope.freq_base_swa": 500.0}),
    ("gemma3", bases({}, {"rope_theta": 500.0}), {"rope.local.freq_base": 500.0}),
    ("qwen3moe", {"norm_topk_prob": False}, {"norm_top_k_prob": False}),
    ("gemma3", {"final_logit_softcapping": 3.0}, {"final_logit_softcapping": 3.0}),
    ("gemma3", {"layer_types": [FULL] * 2}, {"attention.sliding_window": 0}),
    ("gemma3", layers(*[SLIDING] * 5, FULL, SLIDING), {"block_count": 7}),
    ("gemma3", layers(*SIXTY, SLIDING, SLIDING, head_dim=32), {"block_count": 62, **heads(32)}),
    ("qwen2moe", {"moe_intermediate_size": 48}, {"expert_feed_forward_length": 48}),
    ("qwen2moe", {"shared_expert_intermediate_size": 32}, {"expert_shared_feed_forward_length": 32}),
    ("qwen3moe", {"num_experts_per_tok": 3}, {"expert_used_count": 3}),
    ("qwen3moe", {"moe_intermediate_size": 48}, {"expert_feed_forward_length": 48}),
    ("minimax-m2", {"num_experts_per_tok": 3}, {"expert_used_count": 3, "expert_gating_func": 2}),
    ("minimax-m2", rope(partial_rotary_factor=0.5), {"rope.dimension_count": 8}),
    ("lfm2", {"conv_L_cache": 4}, {"shortconv.l_cache": 4}),
    ("lfm2", {"layer_types": [FULL, "conv"]}, {"attention.head_count_kv": [2, 0]}),
    ("falcon", {"layer_norm_epsilon": 0.25}, {"attention.layer_norm_epsilon": 0.25}),
    ("bloom", {"layer_norm_epsilon": 0.25}, {"attention.layer_norm_epsilon": 0.25}),
    ("gpt2", {"layer_norm_epsilon": 0.25}, {"attention.layer_norm_epsilon": 0.25}),
    ("gpt2", {"n_inner": 96}, {"feed_forward_length": 96}),
]
IDS = list(range(3, 60, 2))


def tensors_of(model, family, names):
    """Yield the tensors as llama.cpp's converter writes them, with their names in the file."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": getattr(config, "num_key_value_heads", None)}
    for name, weight in model.state_dict().items():
        place, _, end = name.rpartition(".")
        part = place.rpartition(".")[2]
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if end == "gate_up_proj":
            for half, w in zip(("gate", "up"), weight.chunk(2, 1), strict=True):
                yield names.get_name(f"{place}.{half}_proj") + ".weight", w
            continue
        if family in ("gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
            weight = weight + 1
        elif family == "gpt2" and part in ("c_attn", "c_proj", "c_fc") and end == "weight":
            weight = weight.T
        elif part == "query_key_value" and family == "bloom":
            by_head = weight.view(heads["q_proj"], 3, -1, *weight.shape[1:])
            weight = by_head.transpose(0, 1).reshape(weight.shape)
        elif part == "conv" and weight.dim() > 1:
            weight = weight.squeeze(1)
        elif family == "llama":
            weight = in_pairs(weight, heads.get(part))
        if end in ("weight", "bias"):
            place = place.removeprefix("transformer.") if family == "bloom" else place
            yield f"{names.get_name(place)}.{end}", weight
        elif end == "e_score_correction_bias":
            yield f"blk.{place.split('.')[2]}.exp_probs_b.bias", weight
        else:
            yield f"{names.get_name(name)}.weight", weight


def write(path, family, model, header, tokens=()):
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    writer = gguf_writer(path, family, **header)
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_types([1] * len(tokens))
        writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    names = gguf.get_tensor_name_map(arch, header["block_count"])
    for name, weight in tensors_of(model, family, names):
        writer.add_tensor(name, weight.contiguous().float().numpy())
    return close(writer, path)


def make(path, family, changes=None, header=None, tokens=()):
    """Write a file, and return its path and the model made by hand that it stands for."""
    name, fields, stated = MODELS[family]
    torch.manual_seed(0)
    fields = {**TINY, **fields, **(changes or {})}
    rope_parameters = fields.pop("rope_parameters", None)
    config = getattr(transformers, f"{name}Config")(**fields)
    if rope_parameters is not None:  # Phi-3's class would refuse some that its code computes
        config.rope_parameters = rope_parameters
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    header = {**SIZES, **stated, **(header or {})}
    return write(path, family, with_random_norms(model), header, tokens), model


def described(case):
    family, _, header = case
    return f"{family} {json.dumps(header)[1:60]}"


def some(cases):
    """Mark every other case as slow, and models with many layers."""
    for i, case in enumerate(cases):
        is_slow = i % 2 == 1 or case[2].get("block_count", 0) > 10
        yield pytest.param(case, marks=pytest.mark.slow, id=described(case)) if is_slow else case


@pytest.mark.parametrize("case", [*some(CASES)], ids=described)
def test_a_field_changes_the_config_as_it_changes_a_model_made_by_hand(case, tmp_path):
    family, changes, header = case
    path, model = make(tmp_path / "model.gguf", family, changes, header)
    config = GGUFFile(path).read_config()
    if family in OWN:
        config.dtype = torch.float32
    read = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    read.load_state_dict(model.state_dict())
    torch.testing.assert_close(logprobs_of(read, IDS), logprobs_of(model, IDS), rtol=0, atol=2e-5)


SERVED = ["stablelm", "nemotron", "gemma3", "qwen3moe"]  # the others take too long for every run
OTHERS = [[name, {}, {}] for name in MODELS if name not in SERVED]
OURS = [[*case] for case in CASES if case[0] in OWN]  # decoder.py reads these configs


@pytest.mark.parametrize("case", [*([name, {}, {}] for name in SERVED), *slow(*OTHERS, *OURS)], ids=described)
def test_a_file_computes_what_the_model_made_by_hand_does(case, tmp_path):
    path, model = make(tmp_path / "model.gguf", *case)
    with LLM(str(path), dtype="float32", num_kv_blocks=8) as llm:
        ours = prompt_logprobs(ask(llm, IDS, max_tokens=1, prompt_logprobs=0)[0])
    assert ours == pytest.approx(logprobs_of(model, IDS)[range(len(IDS) - 1), IDS[1:]].tolist(), abs=2e-4)


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
# llama.cpp does not compute these windows, ignores these fields, or reads no such file with these tokens.
NOT_THERE = {("starcoder2", "attention.sliding_window"), ("qwen3", "rope.scaling.yarn_attn_factor")}
NOT_THERE |= {("llama", "rope.scaling.yarn_beta_fast"), ("gemma3", "rope.local.freq_base")}
NOT_THERE |= {("qwen3moe", "norm_top_k_prob")}


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case[0] != "phi3"], ids=described)
def test_llama_cpp_computes_the_same(case, tmp_path):
    llama_cpp = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    family, changes, header = case
    if NOT_THERE & {(family, name) for name in header}:
        pytest.skip("llama.cpp does not apply this field")
    if family in ("minimax-m2", "qwen2moe", "qwen3moe"):  # llama.cpp does not ask the tensors for these
        sizes = {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 48}
        header = {"expert_gating_func": 2, **sizes, **header}
    tokens = [*ALPHABET[: TINY["vocab_size"] - 1], ALPHABET[0] + ALPHABET[1]]
    path, model = make(tmp_path / "model.gguf", family, changes, header, tokens)
    params = llama_cpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(path), 512, 1, False
    params.cache_type_k = params.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    asked = {"prompt": IDS, "n_predict": 1, "temperature": 1.0, "n_probs": len(tokens)}
    asked["logit_bias"] = [[tokens.index("a"), 1e3]]  # half of a character would have no logprobs
    answer = llama_cpp.Server(params).handle_completions(asked)["choices"][0]["logprobs"]["content"][0]
    found = torch.full((len(tokens),), math.nan)
    for entry in answer["top_logprobs"]:
        found[entry["id"]] = entry["logprob"]
    likely = logprobs_of(model, IDS)[-1].topk(32)
    torch.testing.assert_close(found[likely.indices], likely.values, rtol=0, atol=0.2)


REFUSED = [
    ("llama", {"expert_count": 8, "expert_used_count": 2}, "expert_(used_)?count"),
    ("llama", {"rope.dimension_count": 8}, "rope.dimension_count is 8, only 16 is supported"),
    ("qwen2", {"attention.causal": False}, "attention.causal is False, which is not supported"),
    ("qwen3", {"nextn_predict_layers": 1}, "nextn_predict_layers is 1"),
    ("qwen3", {"attention.value_length": 32}, "attention.value_length is 32"),
    ("qwen3", {"rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope', only none, linear"),
    ("gemma2", {"rope.scaling.attn_factor": 1.5}, "rope.scaling.attn_factor is 1.5, which is only supported"),
    ("gemma2", {"rope.freq_base_swa": 1e6}, "rope.freq_base_swa is 1000000.0, which must equal"),
    ("qwen3moe", {"expert_group_count": 2}, "expert_group_count is 2"),
    ("minimax-m2", {"expert_gating_func": 1}, "expert_gating_func is 1"),
    ("lfm2", {"attention.sliding_window": 8}, "attention.sliding_window is 8"),
    ("falcon", {"attention.head_count_kv": 4}, "attention.head_count_kv is 4, only 1"),
    ("bloom", {"feed_forward_length": 96}, "feed_forward_length is 96, only 256"),
    ("stablelm", {"attention.key_length": 32}, "attention.key_length is 32, only 16"),
    ("phi3", {"never.heard_of": 1}, "never.heard_of is 1, which is not supported"),
]


@pytest.mark.parametrize(("family", "header", "words"), REFUSED)
def test_a_field_that_would_change_the_model_is_refused_by_its_name(family, header, words, tmp_path):
    path, _ = make(tmp_path / "model.gguf", family, None, header)
    with pytest.raises(ValueError, match=rf"its {family}\.{words}.*; use the model's safetensors files"):
        GGUFFile(path).read_config()


def test_a_tensor_that_transformers_would_ignore_is_refused(tmp_path):
    path, _ = make(tmp_path / "model.gguf", "phi3")
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_norm", b"blk.1.attn_n0rm"))
    words = r"holds tensor 'blk.1.attn_n0rm.weight', which Phi3\w+ does not have"
    with pytest.raises(ValueError, match=words):
        GGUFFile(path).read_config()


IGNORED: dict[str, object] = {"use_parallel_residual": True, "rope.scaling.finetuned": True}
IGNORED |= {"attention.causal": True, "tensor_data_layout": "Meta AI original pth", "pooling_type": 3}
IGNORED |= {"rope.scaling.original_context_length": 64, "nextn_predict_layers": 0, "logit_scale": 3.0}
IGNORED |= {"attention.head_dim": 16, "mm.tokens_per_image": 256, "expert_group_used_count": 3}
IGNORED |= {"expert_count": 0, "vocab_size": 999}


@pytest.mark.parametrize("family", MODELS)
def test_a_field_that_llama_cpp_ignores_changes_nothing(family, tmp_path):
    ignored = {name: x for name, x in IGNORED.items() if name not in MODELS[family][2]}
    plain = GGUFFile(make(tmp_path / "plain.gguf", family)[0]).read_config()
    config = GGUFFile(make(tmp_path / "model.gguf", family, None, ignored)[0]).read_config()
    assert config.to_dict() == plain.to_dict()


WRONG = {"llama.expert_count": "8", "llama.rope.freq_base": True, "llama.attention.head_count": 4.0}
WRONG |= {"llama.attention.causal": 1, "llama.rope.scaling.type": 2, "llama.rope.scale_linear": "4.0"}
WRONG |= {"llama.pooling_type": "mean", "split.count": "2", "general.file_type": "F16", "general.name": 7}
WRONG |= {"tokenizer.ggml.eos_token_id": 1.0, "tokenizer.ggml.add_bos_token": 1, "tokenizer.ggml.model": 5}
WRONG |= {"llama.attention.head_count_kv": ["2", "2"], "llama.logit_scale": "1.0", "tokenizer.ggml.pre": 1}


@pytest.mark.parametrize("name", WRONG)
def test_a_value_of_another_type_is_refused_by_its_name(name, tmp_path):
    path = tmp_path / "model.gguf"
    sizes = {f"llama.{key}": value for key, value in {**SIZES, **RMS}.items()}
    writer = gguf.GGUFWriter(path, "llama")
    add_fields(writer, sizes | {name: WRONG[name]})
    close(writer, path)
    words = f"its {re.escape(name)} must be (an integer|a number|a text|true or false), got"
    with pytest.raises(ValueError, match=f"model.gguf cannot be loaded: {words}"):
        GGUFFile(path)


@pytest.mark.parametrize("window", [0, 8])
def test_a_window_of_llama_is_that_of_mistral(window, tmp_path):
    path, _ = make(tmp_path / "model.gguf", "llama", None, {"attention.sliding_window": window})
    config = GGUFFile(path).read_config()
    assert DecoderConfig.from_hf(config).windows == (window or None,) * 2
    assert config.model_type == ("mistral" if window else "llama")
