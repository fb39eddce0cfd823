"""Models that run through transformers' own code, against transformers."""

import copy
import sys
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nanoengine import LLM
from nanoengine.checkpoints import hf_config
from nanoengine.checkpoints.checks import UnsupportedModelError
from nanoengine.checkpoints.hf_config import attention_implementation, language_part
from nanoengine.models import hf
from nanoengine.models.hf import HFModel, _Waits
from nanoengine.models.hf_attention import _slopes_of
from tests import helpers
from tests.helpers import GEMMA, TINY, ask, check_answers, checkpoint, random_prompts, refuse, slow

LENGTHS = [1, 13, 40, 75, 20]
NUM_NEW = 16
# Computed as others of the list are; the table of models has them all, at length.
ALIKE = "qwen2-moe olmoe granite-moe glm persimmon starcoder2 stablelm phi olmo2 cohere gpt-neox opt gemma2 "
ALIKE += "gpt-bigcode falcon qwen3-moe exaone4 phi3 phimoe granite olmo olmo3 cohere2 gpt-j smollm3 mpt gemma"
LIKE_OTHERS = {*ALIKE.split(), "falcon new", "falcon, alibi", "llama, dynamic rope"}
BY_DEFAULT = [x for n in helpers.HF_ARCHITECTURES for x in (slow(n) if n in LIKE_OTHERS else [n])]


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_greedy_tokens_equal_transformers_chunked_cached_and_preempted(name, tmp_path_factory):
    path, reference = checkpoint(name, tmp_path_factory)
    assert max(LENGTHS) > 2 * helpers.WINDOW
    assert helpers.check_served(path, reference, LENGTHS, NUM_NEW) == "transformers'"


@pytest.mark.parametrize("intermediate_size", [33, *slow(98)])
def test_experts_may_have_any_size(intermediate_size, tmp_path):
    torch.manual_seed(0)
    sizes = {**TINY, "intermediate_size": intermediate_size, "num_local_experts": 4}
    config = transformers.MixtralConfig(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    assert helpers.check_served(tmp_path, model, LENGTHS, NUM_NEW) == "transformers'"


def check_prompt_logprobs(path, model):
    """Compare a prompt's log-probabilities, computed in chunks, with those of a transformers model."""
    prompt = random_prompts([40])[0]
    expected = helpers.logprobs_of(model, prompt)[range(39), prompt[1:]].tolist()
    with LLM(str(path), num_kv_blocks=20, max_num_batched_tokens=16) as llm:
        ours = helpers.prompt_logprobs(ask(llm, prompt, max_tokens=1, prompt_logprobs=0)[0])
    assert ours == pytest.approx(expected, abs=1e-4)


def test_prompt_logprobs_go_through_the_whole_head(tmp_path_factory):
    """Scaling and soft-capping of logits are part of it."""
    check_prompt_logprobs(*checkpoint("granite", tmp_path_factory))


def test_the_cache_has_the_shape_of_the_model_calls(tmp_path_factory):
    """Not the config's: a latent-attention model stores keys and values of different widths."""
    path, _ = checkpoint("deepseek-v3", tmp_path_factory)
    with LLM(str(path), kv_cache_bytes=100_000, block_size=8) as llm:
        assert llm.llm_engine.runner.caches[1].k.shape[1:] == (8, 4, 24)
        assert llm.llm_engine.runner.caches[1].v.shape[1:] == (8, 4, 12)
        block_bytes = 2 * 8 * 4 * (24 + 12) * 4
        assert llm.metrics()["num_blocks"] == 100_000 // block_bytes - 1


def test_falcon_repeated_heads_are_stored_once(paged_model, tmp_path_factory):
    assert [spec.num_kv_heads for spec in HFModel(paged_model("falcon new")).kv_specs] == [2, 2]
    _, model = checkpoint("falcon new", tmp_path_factory)  # another model of the class keeps its code
    assert type(model.transformer.h[0].self_attention).forward.__module__.startswith("transformers")


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon, alibi"])
def test_a_model_with_alibi_needs_a_backend_that_computes_it(name, paged_model):
    assert HFModel(paged_model(name)).attention_settings == {"alibi_slopes"}


def test_alibi_slopes_are_on_the_layer_s_device():
    layer = nn.Linear(2, 2, device="meta")
    assert _slopes_of(layer, 4).device == layer.weight.device
    assert _slopes_of(layer, 4) is _slopes_of(layer, 4)  # a CUDA graph finds them again


@pytest.fixture
def paged_model(tmp_path_factory):
    """Return a copy of a checkpoint's model in transformers, with nanoengine's attention."""

    def make(name, **settings):
        config = copy.deepcopy(checkpoint(name, tmp_path_factory)[1].config)
        settings["attn_implementation"] = attention_implementation(config)
        return transformers.AutoModelForCausalLM.from_config(config, **settings)

    return make


def test_layers_may_store_differently_wide_keys(paged_model, monkeypatch):
    """The second layer has fewer KV heads; every layer gets a cache of its own shape."""
    monkeypatch.setitem(sys.modules, "nanoengine.models.recurrent", None)  # nothing needs it here
    model = paged_model("olmo")
    attention = model.model.layers[1].self_attn
    attention.k_proj, attention.v_proj = nn.Linear(64, 16, bias=False), nn.Linear(64, 16, bias=False)
    assert [spec[:3] for spec in HFModel(model).kv_specs] == [(2, 16, 16), (1, 16, 16)]


@pytest.mark.parametrize(("family", "is_warned"), [("Roberta", True), ("Bert", False)])
def test_positions_that_differ_from_the_trained_ones_are_logged(family, is_warned, caplog):
    config = getattr(transformers, f"{family}Config")(**TINY | {"pad_token_id": 1}, is_decoder=True)
    implementation = attention_implementation(config)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    HFModel(model.eval())
    assert ("trained from pad_token_id + 1" in caplog.text) == is_warned


def test_the_code_that_runs_is_logged_at_the_start(tmp_path_factory, caplog):
    for name, words in (("gemma", "GemmaForCausalLM on transformers'"), ("qwen3", "on nanoengine's code")):
        with LLM(str(checkpoint(name, tmp_path_factory)[0]), num_kv_blocks=9, block_size=8):
            line = caplog.messages[-1]
        assert words in line
        assert "compiled attention, float32 on cpu, KV cache of 9 blocks of 8 tokens" in line


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("T5", {}, "it is an encoder-decoder"),
        ("Rwkv", {}, "it has no attention, and stores its recurrent states"),
        ("DiffLlama", TINY, "2 layers make 4 replaceable calls"),
        ("Doge", TINY, "it builds its own attention mask"),
        ("Git", {}, "it takes images or audio"),
        ("Mllama", {}, "it takes images or audio"),
        ("XLNet", {}, "its attention does not use transformers' interface"),
        ("Bert", {**TINY, "is_decoder": False}, "its attention is not causal|a trial pass failed"),
        ("MegatronBert", {**TINY, "is_decoder": False}, "its attention is not causal"),
        ("Gemma", {**TINY, "layer_types": ["chunked_attention"] * 2}, "of type chunked_attention"),
        ("Gemma", {**TINY, "attn_temperature_tuning": True}, "attn_temperature_tuning"),
        ("Qwen4Exp", {}, "layers of type indexed_attention"),  # of its language part
        ("Moshi", {**TINY, "sliding_window": 9}, "a sliding layer attends with window None|mask"),
    ],
)
def test_an_unsupported_model_is_refused_with_the_reason(family, changes, reason, tmp_path):
    getattr(transformers, f"{family}Config")(**changes).save_pretrained(tmp_path)
    refuse(tmp_path, f"is not supported: .*({reason})", UnsupportedModelError, load_format="dummy")


VISION: dict[str, Any] = dict.fromkeys(("hidden_size", "embed_dim", "out_hidden_size"), 64)
VISION |= {"num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2, "num_heads": 2}
VISION |= {"intermediate_size": 32, "image_size": 28, "patch_size": 14}
VISION |= {"fullatt_block_indexes": [0], "deepstack_visual_indexes": [0]}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
GLM_ROPE = {**MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
EXPERTS = {**helpers.MOE, **helpers.IN_GROUPS}
GLM4V_MOE = {**EXPERTS, "head_dim": 16, "rope_parameters": GLM_ROPE}
MISTRAL4: dict[str, Any] = {**EXPERTS, **helpers.LATENT, "num_key_value_heads": 4, "v_head_dim": 16}
MISTRAL4["rope_parameters"] = helpers.YARN | {"beta_fast": 32.0, "beta_slow": 1.0}
# Beyond this length queries are scaled by their positions.
MISTRAL4["rope_parameters"] |= {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5}
QWEN3_VL_MOE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
INTERLEAVED = {"rope_parameters": {**MROPE, "mrope_interleaved": True}}
# Family, changes to its text config and to its vision config, the implementation that runs it
WITH_IMAGES = [
    ("Gemma3", {**GEMMA, **helpers.ALTERNATING}, {}, "transformers'"),
    ("Gemma4", {**GEMMA, **helpers.GEMMA4}, {"head_dim": 32}, "transformers'"),
    ("Mistral3", {"model_type": "mistral"}, {"model_type": "pixtral"}, "nanoengine's"),
    ("Llava", {"model_type": "llama"}, {"model_type": "clip_vision_model"}, "nanoengine's"),
    ("Qwen2VL", {"rope_parameters": MROPE}, {}, "nanoengine's"),
    ("Qwen3VL", {"head_dim": 16, **INTERLEAVED}, {}, "nanoengine's"),
]
WITH_IMAGES_SLOW = [  # the others of `WITH_CAUSAL_LM` are laid out like one of those above
    ("InternVL", {"model_type": "qwen2"}, {}, "nanoengine's"),
    ("SmolVLM", {"model_type": "llama"}, {}, "nanoengine's"),
    ("Qwen2_5_VL", {"rope_parameters": MROPE}, {}, "nanoengine's"),
    ("Glm4v", {"rope_parameters": GLM_ROPE}, {}, "transformers'"),
    ("Glm4vMoe", GLM4V_MOE, {}, "transformers'"),
    ("Mistral3", {"model_type": "mistral4", **MISTRAL4}, {"model_type": "pixtral"}, "transformers'"),
    ("Qwen3VLMoe", {**QWEN3_VL_MOE, **INTERLEAVED}, {}, "transformers'"),
]


def test_multimodal_models_have_the_names_of_transformers():
    assert {*hf_config.WITH_CAUSAL_LM, *hf_config.LANGUAGE_PARTS} <= {*CONFIG_MAPPING.keys()}


@pytest.mark.parametrize("tied", [False, *slow(True)])
@pytest.mark.parametrize(("family", "text", "vision", "code"), [*WITH_IMAGES, *slow(*WITH_IMAGES_SLOW)])
def test_the_language_part_of_multimodal_models_is_served(family, text, vision, code, tied, tmp_path, capsys):
    torch.manual_seed(0)
    of_text = {**TINY, "pad_token_id": 0, **text, "tie_word_embeddings": tied}
    parts = {"text_config": of_text, "vision_config": {**VISION, **vision}}
    config = getattr(transformers, f"{family}Config")(**parts, tie_word_embeddings=tied)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path)
    settings = {"num_kv_blocks": 40, "block_size": 8, "max_num_batched_tokens": 30}
    for impl in ["auto"] if code == "transformers'" else ["auto", "transformers"]:
        with LLM(str(tmp_path), model_impl=impl, **settings) as llm:
            assert llm.llm_engine.runner.model.code == (code if impl == "auto" else "transformers'")
            assert "(only its language model: no images) on " in llm.llm_engine.describe()
            assert "UNEXPECTED" not in capsys.readouterr().err  # transformers' report of what is left out
            check_answers(llm, model, random_prompts(LENGTHS), NUM_NEW)


@pytest.mark.parametrize(
    ("family", "text", "names"),
    [
        # Its vision tower needs another library, so that transformers cannot build it whole here.
        ("Gemma3n", {**GEMMA, **helpers.GEMMA3N}, (r"^model\.", "model.language_model.")),
        ("Qwen2VL", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, ("^", "")),
    ],
)
def test_a_language_part_is_found_by_the_names_of_published_checkpoints(family, text, names, tmp_path):
    config = getattr(transformers, f"{family}Config")(text_config={**TINY, **text}, tie_word_embeddings=False)
    part = language_part(config)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(part).eval()
    helpers.composite_of(model, config, names, tmp_path)
    with LLM(str(tmp_path), num_kv_blocks=40, block_size=8) as llm:
        check_answers(llm, model, random_prompts(LENGTHS), NUM_NEW)


@pytest.mark.parametrize("impl", ["auto", "transformers"])
@pytest.mark.parametrize(
    ("present", "name", "reason"),
    [
        (False, "model.language_model.norm.weight", "lacks 1 tensors, the first is 'model.norm.weight'"),
        (True, "model.language_model.layers.0.extra", "'model.layers.0.extra' which the architecture"),
    ],
)
def test_tensors_of_a_language_part_are_checked_strictly(present, name, reason, impl, tmp_path):
    config = transformers.Qwen2VLConfig(text_config=TINY, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(language_part(config))
    helpers.composite_of(model, config, (r"^model\.", "model.language_model."), tmp_path)
    helpers.change_tensors(tmp_path, lambda t: t.update({name: torch.ones(1) if present else None}))
    refuse(tmp_path, reason, model_impl=impl)


@pytest.mark.parametrize("name", ["gpt-neo", "gemma3"])
def test_masks_and_frequencies_in_old_checkpoints_are_ignored(name, tmp_path):
    helpers.hf_model(name).save_pretrained(tmp_path)
    names = "rotary_emb.inv_freq", "attn.masked_bias", "attn.bias", "attn.attention.bias"
    masks = {f"h.0.{one}": torch.ones(1, 1, 8, 8).bool() for one in names}  # no dtype of a weight
    helpers.change_tensors(tmp_path, lambda t: t.update(masks))
    with LLM(str(tmp_path), num_kv_blocks=4, enforce_eager=True) as llm:
        assert ask(llm, [1, 2], max_tokens=1)[0].outputs[0].token_ids


def test_llama_4_is_served_up_to_the_length_of_its_chunks(tmp_path):
    """In the table of models it is asked for tokens that its temperature by position changes."""
    config = transformers.Llama4TextConfig(**TINY, attention_chunk_size=100)
    config.save_pretrained(tmp_path)
    too_long = "max_model_len must be at most 100, the model's limit"
    refuse(tmp_path, too_long, load_format="dummy", max_model_len=101)
    with LLM(str(tmp_path), load_format="dummy", num_kv_blocks=20) as llm:
        assert llm.llm_engine.max_model_len == 100
    for wrong in ("long", 0, None):
        helpers.edit_config(tmp_path, attention_chunk_size=wrong)
        refuse(tmp_path, r"config.json.*attention_chunk_size", load_format="dummy")


def test_a_model_that_mixes_tokens_outside_attention_is_refused(paged_model):
    """Here a norm mixes each token with the one before it, as a convolution would."""
    model = paged_model("olmo")
    HFModel(model)
    model.model.layers[1].post_attention_layernorm.forward = lambda x: x + x.roll(1, dims=1)
    with pytest.raises(UnsupportedModelError, match="tokens interact outside attention"):
        HFModel(model)


def test_a_model_that_takes_positions_from_the_place_in_the_batch_is_refused(paged_model):
    """Here rotary embedding counts from the beginning of the batch, as if it were one sequence."""
    model = paged_model("olmo")
    rotary = model.model.rotary_emb
    rotate = rotary.forward
    rotary.forward = lambda x, position_ids: rotate(x, torch.arange(x.shape[1])[None] + position_ids[:, :1])
    with pytest.raises(UnsupportedModelError, match="takes a token's index in the batch for its position"):
        HFModel(model)


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_rounding_in_bfloat16_is_not_mistaken_for_mixing(name, paged_model):
    assert HFModel(paged_model(name, dtype=torch.bfloat16)).kv_specs[0].dtype == torch.bfloat16


def test_a_window_applied_only_by_a_mask_is_not_ignored_silently(paged_model):
    model = paged_model("gemma2")
    model.model.layers[0].self_attn.sliding_window = None
    with pytest.raises(UnsupportedModelError, match=r"sliding_attention layer .* with window None"):
        HFModel(model)


def test_a_window_that_the_config_class_does_not_know_changes_nothing_as_in_transformers(paged_model):
    model = paged_model("olmo")
    model.config.sliding_window = 24
    assert {spec.window for spec in HFModel(model).kv_specs} == {None}


def test_a_window_of_all_positions_may_be_left_out(tmp_path):
    model = helpers.hf_model("phimoe")
    model.config.sliding_window = 64
    model.save_pretrained(tmp_path)
    refuse(tmp_path, "a sliding layer attends with window None", UnsupportedModelError)
    with LLM(str(tmp_path), num_kv_blocks=8, max_model_len=64) as llm:
        check_answers(llm, model, random_prompts([50]), 14)


def test_an_attention_layer_used_twice_has_a_cache_for_each_use(tmp_path_factory, monkeypatch):
    path, model = checkpoint("olmo", tmp_path_factory)
    twice = copy.deepcopy(model)
    twice.model.layers[1], twice.config.use_cache = twice.model.layers[0], False

    def load(*arguments):
        loaded = load_transformers(*arguments)
        loaded.model.layers[1] = loaded.model.layers[0]
        return loaded

    load_transformers = hf._load_transformers
    monkeypatch.setattr(hf, "_load_transformers", load)
    check_prompt_logprobs(path, twice)


WAITING = [lambda x: x.max().item(), lambda x: bool(x.sum() > 0), lambda x: x.nonzero(), lambda x: x[x > 0]]
QUEUED = [lambda x: x[torch.tensor([1])], lambda x: torch.where(x > 0, x, 0.0), lambda x: x.unsqueeze(0) @ x]


@pytest.mark.parametrize("operation", [*WAITING, lambda x: x.to("meta"), *QUEUED])
def test_operations_that_wait_for_a_gpu_are_detected_without_one(operation):
    with torch.no_grad(), _Waits() as noted:
        operation(torch.ones(3))
    assert (noted.first is None) == (operation in QUEUED)
