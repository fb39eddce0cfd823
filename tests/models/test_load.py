"""Loading: every tensor is checked, every mistake has a clear error, and nothing else changes."""

import gc
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import peft
import pytest
import tokenizers
import tokenizers.models
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanoengine import LLM, EngineConfig, SamplingParams
from nanoengine.backends.packing import PackedEmbedding, Target
from nanoengine.checkpoints.checkpoint import Checkpoint
from nanoengine.models.decoder import Decoder
from nanoengine.models.hf import HFModel, _load_transformers
from nanoengine.models.load import load_model
from tests import helpers
from tests.helpers import TINY, change_tensors, checkpoint, edit_config, open_checkpoint, refuse, slow
from tests.models.test_hf import BY_DEFAULT

NAME = "qwen3"
LOAD_TOKENIZER = "nanoengine.checkpoints.tokenizer.AutoTokenizer.from_pretrained"
IMPLS = pytest.mark.parametrize("impl", ["nanoengine", "transformers"])


@pytest.fixture
def copy(tmp_path, tmp_path_factory):
    """Return a checkpoint directory to damage."""
    shutil.copytree(checkpoint(NAME, tmp_path_factory)[0], tmp_path / "model")
    return tmp_path / "model"


def check_served(path, model, **settings):
    """Check that greedy tokens equal those of the transformers model. Return the loaded model."""
    with LLM(str(path), num_kv_blocks=20, block_size=8, dtype="float32", **settings) as llm:
        helpers.check_answers(llm, model, helpers.random_prompts([5, 40]), 10)
        return llm.llm_engine.runner.model


def rope_of(kind="yarn", **changes):
    """Return rope's settings under both of their names."""
    rope = {**helpers.YARN, "rope_type": kind, "type": kind, **changes}
    return {"rope_parameters": rope, "rope_scaling": rope}


def theta_of(value):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": value}}


SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
SIZES += "head_dim"
POSITIONS, ROPE = "max_position_embeddings", r"config\.json: rope's factor.* must be above 0"
# Changes to config.json that are refused, and the error
BAD_CONFIGS = [
    *(({name: n}, rf"(?s)config\.json.*{name}.*{n}") for name in SIZES.split() for n in (-1, 10**15)),
    *(({"architectures": x}, r"config\.json.*architectures") for x in (5, [5], "Qwen3ForCausalLM", {"a": 1})),
    *(({POSITIONS: n}, rf"config\.json: {POSITIONS} must .*, got {n}$") for n in (-5, 0, 10**12)),
    *((rope_of(factor=x), ROPE) for x in (1e9, -1.0, 0.0, float("nan"), "4")),
    (rope_of("helix"), "helix"),
    *((theta_of(x), "the rope settings .*rope_theta|cannot be loaded: TypeError") for x in ("x", None)),
    *(({"text_config": x}, "config.json: the language model's config must be an object") for x in ([1], 2.0)),
    *(
        ({"quantization_config": {"quant_method": name}}, f" quantized with {name}; supported: gptq, awq")
        for name in ("hqq", "aqlm", "quark")
    ),
]


MISSING, UP = "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"
WEIGHTS, NORM, GPTQ = "model.safetensors", "model.norm.weight", "quantize_config.json"


def tensors(change):
    return lambda path: change_tensors(path, change)


def config(**changes):
    return lambda path: edit_config(path, **changes)


def content(name, holds):
    return lambda path: (path / name).write_text(json.dumps(holds))


ELSE = "{}.* is not supported: its config belongs to Qwen3"
POOLING = "ForSequenceClassification", "ForTokenClassification", "ForRewardModel", "ForProcessRewardModel"
POOLS = "it embeds, scores or classifies texts; nanoengine only generates text"
UNFIT = rf"of another shape than the config requires: .*{NORM}"
NO_WEIGHT = f"holds tensor '{UP}' as .*; a weight must be one of F64, F32"
NO_WEIGHTS = torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn
# A change to a checkpoint, and the error, or both errors where implementations differ
DAMAGES = [
    *((config(**changes), message) for changes, message in BAD_CONFIGS),
    (config(num_attention_heads=0), "the config requires|cannot be loaded: ZeroDivisionError"),
    (config(hidden_act="gulu"), ("'gulu' is not supported; supported: silu", "hidden_act 'gulu' is unkn")),
    (config(architectures=["LlamaForCausalLM"]), ("'qwen3' does not belong to Llama", ELSE.format("Llama"))),
    *(
        (config(architectures=[name]), (f"'{name}' is not supported; supported: Llama", ELSE.format(name)))
        for name in ("GemmaForCausalLM", "Qwen3Unheard")
    ),
    *((config(architectures=[f"Qwen3{name}"]), f"Qwen3{name} is not supported: {POOLS}") for name in POOLING),
    (content("modules.json", []), f"Qwen3ForCausalLM is not supported: {POOLS}"),
    (tensors(lambda t: t.pop(MISSING)), rf"lacks 1 tensors, the first is '{MISSING}'"),
    (tensors(lambda t: t.update(mystery=torch.zeros(2))), "'mystery' which the architecture does not have"),
    (tensors(lambda t: t.update({NORM: torch.zeros(63)})), (rf"'{NORM}' has shape \(63,\)", UNFIT)),
    *((tensors(lambda t, x=x: t.update({UP: t[UP].to(x)})), NO_WEIGHT) for x in NO_WEIGHTS),
    (lambda path: save_file({}, path / WEIGHTS), "lacks 25 tensors"),
    (lambda path: (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-9000]), "is damaged"),
    (lambda path: (path / WEIGHTS).rename(path / "model.bin"), r"holds no \*\.safetensors; pickled weights"),
    (content(GPTQ, {"bits": 4, "group_size": 128}), "config.json says gptq, but no"),
    (content(GPTQ, {"bits": 3}), "quantized with gptq, and its bits is 3; supported: 4, 8"),
    (content("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}), "quant_algo is 'NVFP4'; "),
]


@IMPLS
@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=range(len(DAMAGES)))
def test_a_checkpoint_that_cannot_be_served_is_refused_by_field_tensor_or_file(copy, damage, message, impl):
    damage(copy)
    message = message if isinstance(message, str) else message[impl == "transformers"]
    refuse(copy, message, model_impl=impl)


def test_a_resized_vocabulary_is_refused_with_the_setting_that_loads_it(copy):
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        change_tensors(copy, lambda t, name=name: t.update({name: torch.cat((t[name], t[name][:2]))}))
    shapes = r"has shape \(130, 64\), the config requires \(128, 64\)"
    refuse(copy, shapes + r"; give hf_overrides=\{\"vocab_size\": 130}")
    with LLM(str(copy), num_kv_blocks=4, hf_overrides={"vocab_size": 130}) as llm:
        assert llm.llm_engine.checkpoint.vocab_size == 130


@pytest.mark.parametrize("theta", [0, -1.0, float("nan")])
def test_rope_settings_that_give_no_finite_angles_are_refused(copy, theta):
    edit_config(copy, **theta_of(theta))
    refuse(copy, "the rope settings .* give angles that are not finite")


@pytest.mark.parametrize("content", ["[]", "[" * 10**5, '{"model": null}', "\xff", ""])
def test_unreadable_tokenizer_is_refused_with_its_path(copy, content):
    (copy / "tokenizer.json").write_text(content, encoding="latin-1")
    refuse(copy, "the tokenizer in .*model cannot be used: ")
    helpers.byte_tokenizer().save_pretrained(copy)
    settings = {**json.loads((copy / "tokenizer_config.json").read_text()), "model_max_length": content}
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    refuse(copy, "the tokenizer in .*model cannot be used: ")


def test_a_panic_of_the_tokenizer_library_is_an_error_with_the_path(copy):
    """Its panics are no Exceptions. Here a single text is asked for its second part."""
    helpers.byte_tokenizer().save_pretrained(copy)
    parts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    post_processor = {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": {}}
    whole = json.loads((copy / "tokenizer.json").read_text()) | {"post_processor": post_processor}
    content("tokenizer.json", whole)(copy)
    refuse(copy, "the tokenizer in .*model cannot be used: index out of bounds")


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_a_signal_while_the_tokenizer_loads_is_no_error_of_the_tokenizer(interrupt, copy, monkeypatch):
    helpers.byte_tokenizer().save_pretrained(copy)
    monkeypatch.setattr(LOAD_TOKENIZER, Mock(side_effect=interrupt))
    with pytest.raises(interrupt):
        LLM(copy, num_kv_blocks=4)


def test_overrides_keep_the_quantization_that_another_file_states(copy):
    content(GPTQ, {"bits": 3})(copy)
    with pytest.raises(ValueError, match="quantized with gptq"):
        open_checkpoint(str(copy), hf_overrides={"vocab_size": 200})


def test_a_quantized_multimodal_model_is_read_here_or_refused_by_its_own_name(tmp_path):
    name = "Gemma3ForConditionalGeneration"
    for method in "gptq", "mxfp4":
        stated = {"quantization_config": {"quant_method": method, "bits": 4, "group_size": 16}}
        config = transformers.Gemma3Config(text_config={**TINY, **stated}, architectures=[name], **stated)
        config.save_pretrained(tmp_path)
        if method == "gptq":
            assert not hasattr(open_checkpoint(str(tmp_path)).hf_config, "quantization_config")
    refuse(tmp_path, f"{name} is not supported: quantized multimodal")


def test_a_config_without_architectures_has_that_of_its_class_and_an_empty_quantization_is_none(copy):
    edit_config(copy, architectures=None, quantization_config={})
    assert open_checkpoint(copy).decoder_config is not None
    with LLM(copy, num_kv_blocks=4) as llm:
        assert "quant" not in llm.llm_engine.describe()


DRAFTS = ["model.layers.2.mlp.up_proj.weight"], ["mtp.norm.weight", "model.mtp.0.x"]


@IMPLS
@pytest.mark.parametrize("names", DRAFTS)
def test_draft_layers_are_ignored_and_logged(copy, names, impl, caplog, tmp_path_factory):
    change_tensors(copy, lambda t: t.update((name, torch.zeros(2)) for name in names))
    check_served(copy, checkpoint(NAME, tmp_path_factory)[1], model_impl=impl)
    said = f"ignoring {len(names)} tensors of layers that the config does not have, .* '{min(names)}'"
    assert re.search(said, caplog.text)


@IMPLS
def test_an_adapter_beside_the_weights_is_left_out_and_logged(copy, impl, caplog, tmp_path_factory):
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(helpers.hf_model(NAME), config).save_pretrained(copy)
    check_served(copy, checkpoint(NAME, tmp_path_factory)[1], model_impl=impl)
    assert "also holds an adapter, which is not merged: set lora" in caplog.text


def test_tensorflow_names_of_norms_are_read_as_transformers_does(copy, tmp_path):
    """It renames `LayerNorm.gamma` alone: a Llama's `norm.gamma` it leaves out, and makes the norm up."""
    change_tensors(copy, lambda t: t.update({"model.norm.gamma": t.pop("model.norm.weight")}))
    report = transformers.AutoModelForCausalLM.from_pretrained(copy, output_loading_info=True)[1]
    assert set(report["missing_keys"]) == {"model.norm.weight"}
    refuse(copy, r"lacks 1 tensors, the first is 'model\.norm\.weight'")
    model = transformers.BertLMHeadModel(transformers.BertConfig(**TINY, is_decoder=True)).eval()
    with torch.no_grad():
        model.bert.encoder.layer[1].output.LayerNorm.weight.mul_(torch.linspace(-1, 2, 64))
    model.save_pretrained(tmp_path / "bert")
    tensors = load_file(file := tmp_path / "bert" / "model.safetensors")
    for ours, theirs in (("weight", "gamma"), ("bias", "beta")):
        tensors = {name.replace(f"LayerNorm.{ours}", f"LayerNorm.{theirs}"): x for name, x in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    check_served(tmp_path / "bert", model)


def test_directories_without_a_model_files_and_wrong_paths_have_different_errors(tmp_path):
    refuse(tmp_path, r"holds no config\.json")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    refuse(tmp_path, "holds a LoRA adapter and no model; load 'Qwen/Qwen3-0.6B' with lora=")
    (tmp_path / "file").write_text("x")
    refuse(tmp_path / "file", "got the file")
    refuse(tmp_path / "absent", "neither a directory nor a hub id")
    refuse("no-such-model", "neither a directory nor a hub id")


def test_missing_hub_model_error_names_the_model_and_the_places(monkeypatch):
    refuse("gpt2", r"'gpt2' is neither .* a hub id such as openai-community/gpt2$")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/the/cache")
    looked = r"was not found as a directory, in /the/cache and at https://\S+: "
    refuse("no-owner/no-model", f"'no-owner/no-model' {looked}", OSError)
    refuse("no-owner/no-model", f"'no-owner/no-model' at revision 'v2' {looked}", OSError, revision="v2")


def test_tokenizer_that_needs_sentencepiece_says_so(copy, monkeypatch):
    error = ImportError("SentencePieceExtractor requires the SentencePiece library")
    monkeypatch.setattr(LOAD_TOKENIZER, Mock(side_effect=error))
    monkeypatch.setattr("nanoengine.checkpoints.tokenizer.find_spec", lambda name: None)
    (copy / "tokenizer.model").write_bytes(b"")
    refuse(copy, r"needs sentencepiece: pip install 'nanoengine\[sentencepiece\]'")
    (copy / "tokenizer.json").write_text("{}")
    refuse(copy, "cannot be used: Model missing")  # tokenizer.json is read first


SCALED = {name: value for name, value in helpers.YARN.items() if name != "rope_theta"}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"rope_scaling": SCALED}, {"rope_theta": 5e4, "rope_scaling": SCALED}),
        ({"rope_parameters": {**SCALED, "rope_theta": 100.0}}, {"rope_theta": 100.0, "rope_scaling": SCALED}),
        ({"rope_theta": 100.0}, {"rope_theta": 100.0}),
        ({"rms_norm_eps": 0.5, "max_position_embeddings": 96}, {"rope_theta": 5e4, "rms_norm_eps": 0.5}),
        ({}, {"rope_theta": 5e4}),
    ],
)
def test_overrides_equal_an_edited_config_json(overrides, expected, old, copy):
    """Whether the file has rope's settings as transformers 5 writes them or as those before did."""
    whole = json.loads((copy / "config.json").read_text())
    plain = {name: value for name, value in whole.items() if not name.startswith("rope_")}
    rope = {"rope_theta": 5e4} if old else {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
    (copy / "config.json").write_text(json.dumps(plain | rope))
    opened = open_checkpoint(str(copy), hf_overrides=overrides)
    others = {name: value for name, value in overrides.items() if not name.startswith("rope_")}
    (copy / "config.json").write_text(json.dumps(plain | expected | others))
    edited = open_checkpoint(str(copy))
    assert opened.decoder_config == edited.decoder_config
    assert opened.max_model_len == edited.max_model_len
    assert (opened.decoder_config.rope["rope_type"] == "yarn") == ("yarn" in str(overrides))
    assert opened.hf_config.to_dict() == edited.hf_config.to_dict()


def test_overrides_of_a_part_keep_the_rest_of_it(tmp_path):
    config = transformers.Gemma3Config(text_config={**TINY, "head_dim": 16})
    config.save_pretrained(tmp_path)
    before = open_checkpoint(str(tmp_path), hf_overrides={"text_config": {"rms_norm_eps": 0.5}}).hf_config
    assert before.rms_norm_eps == 0.5
    assert before.hidden_size == config.text_config.hidden_size
    with pytest.raises(ValueError, match=r"has 'no_such', which is not a field of \w+TextConfig"):
        open_checkpoint(str(tmp_path), hf_overrides={"text_config": {"no_such": 1}})
    with pytest.raises(ValueError, match="hf_overrides cannot be loaded"):
        open_checkpoint(str(tmp_path), hf_overrides={"text_config": {"hidden_size": "x"}})
    with pytest.raises(TypeError, match="hf_overrides must be a dict"):
        LLM(str(tmp_path), hf_overrides=lambda config: config)


@IMPLS
def test_sharded_files_load_and_a_missing_shard_is_named(impl, tmp_path):
    model = helpers.hf_model(NAME)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    check_served(tmp_path, model, model_impl=impl)
    shards[1].unlink()
    refuse(tmp_path, f"lacks the shard {shards[1].name}", model_impl=impl)


def test_without_an_index_other_files_are_read_only_if_none_is_named_model(copy):
    (copy / "consolidated.safetensors").write_bytes(b"not read")
    assert len(open_checkpoint(str(copy)).open_files().headers) == 25
    (copy / "model.safetensors").replace(copy / "consolidated.safetensors")
    assert len(open_checkpoint(str(copy)).open_files().headers) == 25


@IMPLS
@pytest.mark.parametrize("held", ["another head", "the same head", "the head alone"])
def test_tied_model_uses_the_head_in_its_files_as_transformers_does(held, impl, tmp_path, tmp_path_factory):
    path, tied = checkpoint("qwen2 tied", tmp_path_factory)
    shutil.copytree(path, tmp_path / "model")
    embedding = tied.get_input_embeddings().weight.detach()
    head = torch.randn_like(embedding) if held == "another head" else embedding.clone()
    change_tensors(tmp_path / "model", lambda t: t.update({"lm_head.weight": head}))
    if held == "the head alone":
        change_tensors(tmp_path / "model", lambda t: t.pop("model.embed_tokens.weight"))
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    mine, theirs = (helpers.greedy(model, [7, 8], 10) for model in (reference, tied))
    assert (mine == theirs) == (held != "another head")
    model = check_served(tmp_path / "model", reference, model_impl=impl)
    if impl == "nanoengine":
        is_packed = isinstance(model.embed_tokens, PackedEmbedding)
        is_tied = is_packed or model.lm_head.weight is model.embed_tokens.weight
        assert is_tied == (held != "another head")


def test_tensor_names_that_only_transformers_knows_run_on_its_code(tmp_path, tmp_path_factory):
    """A Llama without the `model.` prefix, for one: the weights decide, the config is the same."""
    path, model = checkpoint("qwen2 tied", tmp_path_factory)
    shutil.copytree(path, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    refuse(tmp_path / "model", r"lacks 26 tensors, the first is 'model\.", model_impl="nanoengine")
    assert isinstance(check_served(tmp_path / "model", model), HFModel)


@pytest.mark.parametrize("name", ["qwen2 tied", "qwen3"])
def test_model_saved_without_a_head_is_served_if_the_head_is_tied(name, tmp_path, tmp_path_factory):
    path, model = checkpoint(name, tmp_path_factory)
    transformers.AutoModel.from_pretrained(path).save_pretrained(tmp_path)
    if name == "qwen3":
        refuse(tmp_path, r"lacks 25 tensors, the first is 'lm_head\.weight'")
    else:
        check_served(tmp_path, model)


INDEX, GENERATION = "model.safetensors.index.json", "generation_config.json"
NO_IDS, NO_MAPS = (b'"x"', b"[null]", b"true", b"{}"), (b"{}", b'{"weight_map": [1]}', b'{"weight_map": {}}')
BROKEN = [
    *((file, text, "is not JSON") for file in (INDEX, GENERATION) for text in (b"{", b"\xff", b"[" * 10**5)),
    *((file, b"[1]", "must hold a JSON object") for file in (INDEX, GENERATION)),
    *((INDEX, text, "weight_map must name the file of each tensor, got ") for text in NO_MAPS),
    (INDEX, b'{"weight_map": {"a": 3}}', "for 'a', got 3"),
    (INDEX, b'{"weight_map": {"a": null}}', "for 'a', got None"),
    (INDEX, b'{"weight_map": {"a": "../model.safetensors"}}', "must name a file beside it for 'a'"),
    (INDEX, b'{"weight_map": {"a": "."}}', "must name a file beside it for 'a'"),
    (INDEX, b'{"weight_map": {"a": "%s"}}' % (b"x" * 999), "OSError: .*too long"),
    (GENERATION, b'{"temperature": "hot"}', "temperature must be"),
    (GENERATION, b'{"temperature": -1}', "temperature must be"),
    (GENERATION, b'{"top_k": 0.5}', "top_k must be"),
    (GENERATION, b'{"max_new_tokens": 0}', "max_tokens must be"),
    *((GENERATION, b'{"eos_token_id": %s}' % x, "eos_token_id must be") for x in NO_IDS),
]


@pytest.mark.parametrize(("file", "text", "message"), BROKEN)
def test_broken_json_file_is_refused_by_file_and_field(copy, file, text, message):
    (copy / file).write_bytes(text)
    with pytest.raises(ValueError, match=f"{re.escape(file)}.*{message}"):
        open_checkpoint(str(copy)).open_files()


@pytest.mark.xfail(torch.__version__ < "2.10", reason="the experts are bfloat16 and their inputs float32")
def test_mxfp4_weights_are_served_dequantized(tmp_path):
    """The oracle dequantizes by the format's definition: 32 values of 4 bits share an exponent."""
    model = helpers.hf_model("gpt-oss")
    model.save_pretrained(tmp_path)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat((values, -values))
    quantized = {}
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inner, outer = parameter.shape
            codes = torch.randint(16, (experts, outer, inner // 32, 32))
            exponents = torch.randint(-5, -2, (experts, outer, inner // 32))
            weight = (values[codes] * 2.0 ** exponents.unsqueeze(-1)).flatten(2).transpose(1, 2)
            parameter.data.copy_(weight)
            quantized[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
            quantized[f"{name}_scales"] = (exponents + 127).to(torch.uint8)

    assert len(quantized) == 8
    replaced = dict.fromkeys(name.removesuffix("_blocks") for name in quantized)
    change_tensors(tmp_path, lambda t: t.update(replaced | quantized))
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    check_served(tmp_path, model)


ELSEWHERE = torch.device("meta")  # the one device besides the CPU that every machine has; it holds no numbers


def loaded_on(device, path, **settings):
    """Return transformers' model as it was loaded, before anything moves it."""
    config = EngineConfig(model=str(path), model_impl="transformers", **settings)
    opened = open_checkpoint(config.model, model_impl="transformers")
    target = Target(torch.bfloat16, torch.device(device), lambda *_: None)
    return _load_transformers(opened, config, target, None)


@pytest.mark.parametrize("load_format", ["auto", *slow("dummy")])
@pytest.mark.parametrize("name", BY_DEFAULT)
def test_transformers_fills_a_model_on_its_device(name, load_format, tmp_path_factory):
    path, model = checkpoint(name, tmp_path_factory)
    loaded = loaded_on(ELSEWHERE, path, load_format=load_format)
    assert {x.device for x in (*loaded.parameters(), *loaded.buffers())} == {ELSEWHERE}
    ours, theirs = ({name: x.shape for name, x in m.named_parameters()} for m in (loaded, model))
    assert ours == theirs  # tied ones once


def test_without_accelerate_a_model_is_filled_on_the_host(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("nanoengine.models.hf.find_spec", lambda name: None)
    path, _ = checkpoint("gemma", tmp_path_factory)
    assert {x.device.type for x in loaded_on(ELSEWHERE, path).parameters()} == {"cpu"}


LOAD = """
import re, sys, threading
from pathlib import Path
import torch
from tests.models.test_load import loaded_on

def held():
    return int(re.search("RssAnon:.*?([0-9]+)", Path("/proc/self/status").read_text())[1]) / 1024

def watch():
    while not is_over.wait(0.001):
        seen.append(held())

path, load_format, device = sys.argv[1:]
torch.ones(1).to(device, torch.bfloat16).normal_()  # what a device is set up with once
before, seen, is_over = held(), [], threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
loaded_on(device, path, load_format=load_format)
is_over.set()
watcher.join()
print(max(seen) - before)
"""


def host_memory_of_loading(path, num_layers, load_format, device):
    """Return the peak MiB of the host while a float32 model is loaded as bfloat16, and the model's MiB."""
    changes = {**TINY, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": num_layers}
    model = transformers.AutoModelForCausalLM.from_config(transformers.OlmoConfig(**changes))
    model.save_pretrained(path, max_shard_size="20MB")
    run = [sys.executable, "-c", LOAD, str(path), load_format, device]
    root = Path(__file__).parents[2]
    printed = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True, cwd=root).stdout
    return float(printed), sum(x.nbytes for x in model.parameters()) / 2**21


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells how much a process holds")
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_the_host_never_holds_a_model_that_is_loaded_elsewhere(load_format, tmp_path):
    taken, size = host_memory_of_loading(tmp_path, 12, load_format, "meta")
    assert taken < 40 < 90 < size  # transformers 4 reads a file of 20 MB at a time


def test_code_in_a_checkpoint_runs_only_if_trusted(copy):
    (copy / "mine.py").write_text("raise AssertionError('ran')")
    mine = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}
    edit_config(copy, auto_map=mine, model_type="mine", architectures=["MyModel"])
    refuse(copy, "trust_remote_code")
    refuse(copy, "cannot be loaded: AssertionError: ran", trust_remote_code=True)


def test_a_failed_load_keeps_no_memory(copy):
    def models():
        gc.collect()
        return {id(x) for x in gc.get_objects() if type(x) in (Decoder, HFModel)}

    change_tensors(copy, lambda t: t.pop("lm_head.weight"))
    before = models()  # other tests' caches hold some
    for impl in ("nanoengine", "transformers"):
        refuse(copy, "lacks 1 tensors", model_impl=impl)
    assert models() <= before


def test_dummy_weights_need_only_a_config(copy):
    for file in copy.iterdir():
        if file.name != "config.json":
            file.unlink()
    with LLM(str(copy), load_format="dummy", num_kv_blocks=8, dtype="bfloat16") as llm:
        assert llm.get_tokenizer() is None
        output = helpers.ask(llm, [1, 2, 3], max_tokens=4)[0].outputs[0]
        assert (len(output.token_ids), output.text) == (4, "")
        with pytest.raises(ValueError, match="no tokenizer"):
            helpers.ask(llm, "text")
        with pytest.raises(ValueError, match="stop needs a tokenizer"):
            helpers.ask(llm, [1], stop="x")


def test_dtype_auto_is_the_checkpoints_own(copy):
    edit_config(copy, dtype="bfloat16")
    with LLM(str(copy), num_kv_blocks=4) as llm:
        assert llm.llm_engine.runner.model.norm.weight.dtype == torch.bfloat16
        assert llm.llm_engine.runner.caches[0].k.dtype == torch.bfloat16


def test_eos_ids_come_from_all_files_and_sampling_parameters_from_the_generation_config_unless_vllm(
    copy, caplog
):
    generation = {"eos_token_id": [5, 9], "temperature": 0.3, "max_new_tokens": 77}
    generation |= {"suppress_tokens": [4], "num_beams": 4, "min_length": 0, "typical_p": 1.0, "top_p": None}
    (copy / "generation_config.json").write_text(json.dumps(generation))
    edit_config(copy, eos_token_id=[7, 500, -1])  # the last two are no tokens
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{i}": i for i in range(10)}))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="t3")
    tokenizer.save_pretrained(copy)
    own, plain = open_checkpoint(copy), open_checkpoint(copy, generation_config="vllm")
    assert own.eos_token_ids == plain.eos_token_ids == (3, 7, 5, 9)
    params = own.default_sampling_params()
    assert (params.temperature, params.top_p, params.max_tokens) == (0.3, 1.0, 77)
    assert plain.default_sampling_params() == SamplingParams()
    (warning,) = caplog.messages
    assert warning.endswith("not applied, as in vLLM: suppress_tokens, num_beams")


# Types whose config class has a default -> it
WITH_END = {"llama": 2, "mistral": 2, "gpt_neox": 2, "opt": 2, "falcon": 11, "stablelm": 0, "gemma2": 1}
WITH_END |= {"bloom": 2, "phi3": 32000, "mixtral": 2, "gpt2": 50256, "cohere": 255001, "olmo": 50279}


def ends_of(path, config, **settings):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return open_checkpoint(str(path), **settings).eos_token_ids


@pytest.mark.parametrize("kind", WITH_END)
def test_a_config_that_states_no_end_has_none(kind, tmp_path):
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    config = {"model_type": kind, "architectures": [names[kind]]}
    assert transformers.AutoConfig.for_model(kind).eos_token_id == WITH_END[kind]
    assert ends_of(tmp_path, config) == ()
    assert ends_of(tmp_path, config, hf_overrides={"vocab_size": 300000}) == ()
    assert ends_of(tmp_path, config, hf_overrides={"eos_token_id": 5}) == (5,)
    for stated, ends in ((None, ()), (3, (3,)), ([4, 3], (4, 3)), (WITH_END[kind], (WITH_END[kind],))):
        assert ends_of(tmp_path, {**config, "eos_token_id": stated}) == ends
    for changed, ends in (([6, 5], (6, 5)), (None, ())):
        given = {"eos_token_id": changed}
        assert ends_of(tmp_path, {**config, "eos_token_id": 3}, hf_overrides=given) == ends
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert ends_of(tmp_path, config) == (9,)


def test_a_multimodal_config_may_state_the_end_for_the_model_or_for_its_language_model(tmp_path):
    text = {**TINY, "head_dim": 16, "model_type": "gemma3_text"}
    del text["eos_token_id"]
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    whole["vision_config"] = {"eos_token_id": 8}  # another part's
    assert transformers.Gemma3Config(text_config=text).text_config.eos_token_id == 1
    changed, kept = ({"text_config": one} for one in ({"eos_token_id": 7}, {"rms_norm_eps": 1e-5}))
    for own, of_whole, ends in ((text, [5, 6], (5, 6)), ({**text, "eos_token_id": 3}, [5, 3], (3, 5))):
        config = {**whole, "text_config": own}
        own_ends = ends[: len(own) - len(text)]  # none, or that of the language model
        assert ends_of(tmp_path, config) == ends_of(tmp_path, config, hf_overrides=kept) == own_ends
        assert ends_of(tmp_path, {**config, "eos_token_id": of_whole}) == ends
        assert ends_of(tmp_path, config, hf_overrides=changed) == (7,)
    flat = {**text, "model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]}
    flat |= {"vocab_size": 151646, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    assert ends_of(tmp_path, flat) == ()
    assert ends_of(tmp_path, {**flat, "eos_token_id": 4}) == (4,)


OF_64 = {"rope_parameters": {**helpers.YARN, "original_max_position_embeddings": 64}}
LINEAR_BY_4 = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
BY_LAYER = {"full_attention": LINEAR_BY_4, "sliding_attention": {"rope_type": "default"}}


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("Llama", {}, 512),
        *(("Llama", {POSITIONS: own, **OF_64}, most) for own, most in ((64, 256), (1024, 1024))),
        *((family, {"rope_parameters": LINEAR_BY_4}, 4 * 512) for family in ("Llama", "Qwen2", "Phi")),
        ("Gemma3Text", {"rope_parameters": BY_LAYER}, 512),  # which states the product
        # These depend on the length.
        ("Phi3", helpers.HF_ARCHITECTURES["phi3 longrope"][1], 128),
        ("Llama", helpers.HF_ARCHITECTURES["llama, dynamic rope"][1], 512),
    ],
)
def test_yarn_and_linear_rope_extend_the_positions_and_other_kinds_do_not(family, changes, expected):
    config = getattr(transformers, f"{family}Config")(**{**TINY, **changes})
    assert Checkpoint(Path(), config, None, None, (), {}).max_model_len == expected


SPELLINGS = ("Llama", "LLaMA"), ("Llama", "Yi"), ("Llama", "Mistral"), ("Qwen2", "Qwen"), ("Gemma", "GEMMA")


@pytest.mark.parametrize(("family", "spelling"), SPELLINGS)
def test_the_model_type_decides_if_the_architecture_is_spelled_in_another_way(family, spelling, tmp_path):
    config = getattr(transformers, f"{family}Config")(**TINY, architectures=[f"{spelling}ForCausalLM"])
    config.save_pretrained(tmp_path)
    opened = open_checkpoint(str(tmp_path))
    assert opened.architecture == f"{family}ForCausalLM"
    assert (opened.decoder_config is not None) == (family != "Gemma")


def test_a_window_of_a_llama_config_changes_nothing_as_in_transformers(tmp_path):
    config = transformers.LlamaConfig(**TINY, architectures=["LlamaForCausalLM"], sliding_window=8)
    config.save_pretrained(tmp_path)
    assert open_checkpoint(str(tmp_path)).decoder_config.windows == (None, None)


def test_layer_types_of_a_mistral_config_say_which_layers_have_a_window(tmp_path):
    """transformers loads such a config as Ministral, whatever its architectures are."""
    types = ["full_attention", "sliding_attention"]
    settings = {"architectures": ["MistralForCausalLM"], "sliding_window": 8, "layer_types": types}
    transformers.MistralConfig(**TINY, **settings).save_pretrained(tmp_path)
    opened = open_checkpoint(str(tmp_path))
    assert (opened.architecture, opened.decoder_config.windows) == ("MinistralForCausalLM", (None, 8))


def test_a_complete_file_is_read_beside_a_stale_index_or_a_variant(copy):
    held = load_file(copy / "model.safetensors")
    save_file({name: x.half() for name, x in held.items()}, copy / "model.fp16.safetensors")
    headers = open_checkpoint(str(copy)).open_files().headers
    assert {header.file.name for header in headers.values()} == {"model.safetensors"}
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(held, "model-00001-of-00001.safetensors")}))
    assert open_checkpoint(str(copy)).open_files().headers == headers
    index.unlink()
    (copy / "model.safetensors").rename(copy / "model-1.safetensors")
    refuse(copy, r"twice, in model-1.safetensors and model.fp16.safetensors")


def test_model_without_positions_needs_max_model_len(copy, monkeypatch):
    monkeypatch.setattr(Checkpoint, "max_model_len", None)
    refuse(copy, "max_model_len must be given")
    with LLM(str(copy), num_kv_blocks=4, max_model_len=100) as llm:
        assert llm.llm_engine.max_model_len == 100


def test_weights_that_are_rounded_at_load_never_lie_on_a_gpu():
    config = EngineConfig(model="demo", quantization="int4")
    target = Target(torch.bfloat16, torch.device("meta"), None)
    model = load_model(open_checkpoint("demo"), config, target, 64)
    assert {x.device.type for x in model.parameters()} == {"cpu"}
    assert {x.device.type for x in model.rope_table} == {"meta"}
