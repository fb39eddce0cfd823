"""Loading: strict about every tensor, clear about every mistake, and without side effects."""

import gc
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import tokenizers.models
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanoengine import LLM, EngineConfig, SamplingParams
from nanoengine.backends.quantized import PackedEmbedding
from nanoengine.models.checkpoint import Checkpoint, open_checkpoint, resolve_dtype
from nanoengine.models.decoder import Decoder
from nanoengine.models.hf import HFModel, _load_transformers
from tests.helpers import HF_ARCHITECTURES, TINY, YARN, checkpoint, greedy, hf_model, random_prompts

NAME = "qwen3"


IMPLS = pytest.mark.parametrize("impl", ["nanoengine", "transformers"])


@pytest.fixture
def copy(tmp_path, tmp_path_factory):
    """A checkpoint directory to damage."""
    shutil.copytree(checkpoint(NAME, tmp_path_factory)[0], tmp_path / "model")
    return tmp_path / "model"


def edit(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")


def edit_config(path, **changes):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def refuse(path, message, error=ValueError, **settings):
    """Loading fails with that message, and leaves torch's defaults as they were."""
    before = torch.get_default_dtype(), torch.get_default_device()
    with pytest.raises(error, match=message):
        LLM(str(path), num_kv_blocks=4, **settings)
    assert (torch.get_default_dtype(), torch.get_default_device()) == before


@pytest.mark.parametrize(
    "field",
    [
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim"),
    ],
)
@pytest.mark.parametrize("value", [-1, 10**15])
def test_a_size_that_cannot_be_is_refused_by_its_name(copy, field, value):
    edit_config(copy, **{field: value})
    refuse(copy, rf"(?s)config\.json.*{field}.*{value}")


@pytest.mark.parametrize("content", ["[]", "[" * 10**5, '{"model": null}', "\xff", ""])
def test_a_tokenizer_that_cannot_be_read_is_refused_with_its_path(copy, content):
    (copy / "tokenizer.json").write_text(content, encoding="latin-1")
    refuse(copy, "the tokenizer in .*model cannot be used: ")


def test_a_config_without_architectures_is_of_the_one_its_class_stands_for(copy):
    edit_config(copy, architectures=None)
    with LLM(str(copy), num_kv_blocks=4) as llm:
        assert llm.llm_engine.runner.model.code == "nanoengine's"


@pytest.mark.parametrize("architectures", [5, [5], "Qwen3ForCausalLM", {"a": 1}])
def test_architectures_that_are_no_list_of_names_are_refused(copy, architectures):
    edit_config(copy, architectures=architectures)
    refuse(copy, r"config\.json: architectures must be a list of names")


@IMPLS
def test_a_missing_tensor_is_named(copy, impl):
    edit(copy, lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"))
    message = r"lacks 1 tensors, the first is 'model\.layers\.1\.self_attn\.k_proj\.weight'"
    refuse(copy, message, model_impl=impl)


@IMPLS
def test_an_unexpected_tensor_is_named(copy, impl):
    edit(copy, lambda t: t.update({"model.layers.0.mystery.weight": torch.zeros(2)}))
    refuse(copy, r"'model\.layers\.0\.mystery\.weight' which the architecture does not have", model_impl=impl)


@IMPLS
@pytest.mark.parametrize(
    "names", [["model.layers.2.mlp.up_proj.weight"], ["mtp.norm.weight", "model.mtp.0.x"]]
)
def test_layers_that_only_guess_ahead_are_left_out_and_said_so(copy, names, impl, caplog, tmp_path_factory):
    edit(copy, lambda t: t.update((name, torch.zeros(2)) for name in names))
    with LLM(str(copy), num_kv_blocks=8, model_impl=impl) as llm:
        output = llm.generate([7, 8], SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
    assert output[0].outputs[0].token_ids == greedy(checkpoint(NAME, tmp_path_factory)[1], [7, 8], 10)
    said = (
        f"ignoring {len(names)} tensors of layers that the config does not have, the first is '{min(names)}'"
    )
    assert said in caplog.text


def test_norms_by_their_names_in_tensorflow_are_read_as_transformers_reads_them(copy, tmp_path):
    """It renames `LayerNorm.gamma` alone: a Llama's `norm.gamma` it leaves out, and makes the norm up."""
    edit(copy, lambda t: t.update({"model.norm.gamma": t.pop("model.norm.weight")}))
    report = transformers.AutoModelForCausalLM.from_pretrained(copy, output_loading_info=True)[1]
    assert set(report["missing_keys"]) == {"model.norm.weight"}
    refuse(copy, r"lacks 1 tensors, the first is 'model\.norm\.weight'")
    model = transformers.BertLMHeadModel(transformers.BertConfig(**TINY, is_decoder=True)).eval()
    with torch.no_grad():
        model.bert.encoder.layer[1].output.LayerNorm.weight.mul_(torch.linspace(-1, 2, 64))
    model.save_pretrained(tmp_path / "bert")
    tensors = load_file(tmp_path / "bert" / "model.safetensors")
    for ours, theirs in (("weight", "gamma"), ("bias", "beta")):
        tensors = {name.replace(f"LayerNorm.{ours}", f"LayerNorm.{theirs}"): x for name, x in tensors.items()}
    save_file(tensors, tmp_path / "bert" / "model.safetensors", metadata={"format": "pt"})
    with LLM(str(tmp_path / "bert"), num_kv_blocks=8) as llm:
        output = llm.generate([7, 8], SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
    assert output[0].outputs[0].token_ids == greedy(model, [7, 8], 10)


@IMPLS
def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(copy, impl):
    edit(copy, lambda t: t.update({"model.norm.weight": torch.zeros(63)}))
    shapes = r"'model\.norm\.weight' has shape \(63,\), the config asks for \(64,\)"
    other = r"of another shape than the config asks for: .*model\.norm\.weight"
    refuse(copy, shapes if impl == "nanoengine" else other, model_impl=impl)


@IMPLS
def test_a_truncated_file_is_reported_as_damaged(copy, impl):
    data = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(data[: len(data) // 2])
    refuse(copy, r"is damaged", model_impl=impl)


@IMPLS
def test_a_directory_without_safetensors_is_refused_rather_than_run_uninitialised(copy, impl):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    refuse(copy, r"holds no \*\.safetensors; pickled weights", model_impl=impl)


def test_an_empty_directory_a_file_and_a_wrong_path_are_told_apart(tmp_path):
    refuse(tmp_path, r"holds no config\.json")
    (tmp_path / "file").write_text("x")
    refuse(tmp_path / "file", "got the file")
    refuse(tmp_path / "absent", "neither a directory nor a hub id")
    refuse("no-such-model", "neither a directory nor a hub id")


def test_a_model_that_is_not_there_is_told_by_its_id_and_where_it_was_looked_for(monkeypatch):
    refuse("gpt2", r"'gpt2' is neither .* a hub id such as openai-community/gpt2$")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/the/cache")
    looked = r"was not found as a directory, in /the/cache and at https://\S+: "
    refuse("nobody/nothing", f"'nobody/nothing' {looked}", OSError)
    refuse("nobody/nothing", f"'nobody/nothing' at revision 'v2' {looked}", OSError, revision="v2")


def test_a_folder_of_an_adapter_says_what_it_is_an_adapter_of(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    refuse(tmp_path, "holds a LoRA adapter and no model; load 'Qwen/Qwen3-0.6B' with lora=")


def test_a_tokenizer_that_needs_sentencepiece_says_so(copy, monkeypatch):
    def fail(*_, **__):
        raise ImportError("SentencePieceExtractor requires the SentencePiece library")

    monkeypatch.setattr("nanoengine.models.checkpoint.AutoTokenizer.from_pretrained", fail)
    monkeypatch.setattr("nanoengine.models.checkpoint.find_spec", lambda name: None)
    (copy / "tokenizer.model").write_bytes(b"")
    refuse(copy, r"needs sentencepiece: pip install 'nanoengine\[sentencepiece\]'")
    (copy / "tokenizer.json").write_text("{}")
    refuse(copy, "cannot be used: SentencePieceExtractor")  # whatever it is: there is a tokenizer.json


SCALED = {name: value for name, value in YARN.items() if name != "rope_theta"}


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
def test_overrides_are_as_if_they_stood_in_config_json(overrides, expected, old, copy):
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
    with pytest.raises(
        ValueError, match=r"hf_overrides has 'no_such', which is not a field of \w+TextConfig"
    ):
        open_checkpoint(str(tmp_path), hf_overrides={"text_config": {"no_such": 1}})
    with pytest.raises(ValueError, match="cannot be loaded"):
        open_checkpoint(str(tmp_path), hf_overrides={"text_config": {"hidden_size": "x"}})
    with pytest.raises(TypeError, match="hf_overrides must be a dict"):
        LLM(str(tmp_path), hf_overrides=lambda config: config)


def test_generation_config_vllm_takes_no_sampling_parameter_from_the_checkpoint(copy):
    (copy / "generation_config.json").write_text('{"temperature": 0.25, "eos_token_id": [7, 9]}')
    own, plain = open_checkpoint(str(copy)), open_checkpoint(str(copy), generation_config="vllm")
    assert own.default_sampling_params().temperature == 0.25
    assert plain.default_sampling_params() == SamplingParams()
    assert own.eos_token_ids == plain.eos_token_ids
    assert {7, 9} <= set(plain.eos_token_ids)


@IMPLS
def test_sharded_files_load_like_a_single_one_and_a_missing_shard_is_named(impl, tmp_path):
    model = hf_model(NAME)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    prompt = [1, 2, 3]
    with LLM(str(tmp_path), num_kv_blocks=8, model_impl=impl) as llm:
        output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
    assert output[0].outputs[0].token_ids == greedy(model, prompt, 10)
    shards[1].unlink()
    refuse(tmp_path, f"lacks the shard {shards[1].name}", model_impl=impl)


def test_without_an_index_other_files_are_read_only_if_none_is_named_model(copy):
    (copy / "consolidated.safetensors").write_bytes(b"not read")
    assert len(open_checkpoint(str(copy)).open_files().headers) == 25
    (copy / "model.safetensors").replace(copy / "consolidated.safetensors")
    assert len(open_checkpoint(str(copy)).open_files().headers) == 25


def test_a_file_without_tensors_is_refused_rather_than_run_uninitialised(copy):
    save_file({}, copy / "model.safetensors")
    refuse(copy, "lacks 25 tensors")


@IMPLS
@pytest.mark.parametrize("held", ["another head", "the same head", "the head alone"])
def test_a_tied_model_uses_the_head_its_files_hold_as_transformers_does(
    held, impl, tmp_path, tmp_path_factory
):
    if held == "another head" and transformers.__version__ < "5":
        pytest.skip("transformers 4 ties whatever the files hold")
    path, tied = checkpoint("qwen2 tied", tmp_path_factory)
    shutil.copytree(path, tmp_path / "model")
    embedding = tied.get_input_embeddings().weight.detach()
    head = torch.randn_like(embedding) if held == "another head" else embedding.clone()
    edit(tmp_path / "model", lambda t: t.update({"lm_head.weight": head}))
    if held == "the head alone":
        edit(tmp_path / "model", lambda t: t.pop("model.embed_tokens.weight"))
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = greedy(reference, [7, 8], 10)
    assert (expected == greedy(tied, [7, 8], 10)) == (held != "another head")
    with LLM(str(tmp_path / "model"), num_kv_blocks=8, model_impl=impl) as llm:
        model = llm.llm_engine.runner.model
        if impl == "nanoengine":
            is_tied = isinstance(model.embed_tokens, PackedEmbedding) or (
                model.lm_head.weight is model.embed_tokens.weight
            )
            assert is_tied == (held != "another head")
        output = llm.generate([7, 8], SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
    assert output[0].outputs[0].token_ids == expected


def test_tensors_whose_names_only_transformers_knows_are_served_by_its_code(tmp_path, tmp_path_factory):
    """A Llama without the `model.` prefix, for one: the weights decide, the config is the same."""
    path, model = checkpoint("qwen2 tied", tmp_path_factory)
    shutil.copytree(path, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    refuse(tmp_path / "model", r"lacks 26 tensors, the first is 'model\.", model_impl="nanoengine")
    with LLM(str(tmp_path / "model"), num_kv_blocks=8) as llm:
        assert isinstance(llm.llm_engine.runner.model, HFModel)
        output = llm.generate([7, 8], SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
    assert output[0].outputs[0].token_ids == greedy(model, [7, 8], 10)


@pytest.mark.parametrize("name", ["qwen2 tied", "qwen3"])
def test_a_body_saved_alone_is_served_where_its_head_is_the_embedding(name, tmp_path, tmp_path_factory):
    path, model = checkpoint(name, tmp_path_factory)
    transformers.AutoModel.from_pretrained(path).save_pretrained(tmp_path)
    if name == "qwen3":
        refuse(tmp_path, r"lacks 25 tensors, the first is 'lm_head\.weight'")
        return
    with LLM(str(tmp_path), num_kv_blocks=8) as llm:
        output = llm.generate([7, 8], SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
    assert output[0].outputs[0].token_ids == greedy(model, [7, 8], 10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"weight_map": {"a', "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "must hold a JSON object"),
        (b"{}", ": weight_map must name the file of each tensor, got None"),
        (b'{"weight_map": [1]}', ": weight_map must name the file of each tensor"),
        (b'{"weight_map": {}}', ": weight_map must name the file of each tensor"),
        (b'{"weight_map": {"a": 3}}', "for 'a', got 3"),
        (b'{"weight_map": {"a": null}}', "for 'a', got None"),
        (b'{"weight_map": {"a": "../model.safetensors"}}', "must name a file beside it for 'a'"),
        (b'{"weight_map": {"a": "."}}', "must name a file beside it for 'a'"),
    ],
)
@IMPLS
def test_a_broken_index_of_shards_is_refused_by_file_and_field(copy, text, message, impl):
    (copy / "model.safetensors.index.json").write_bytes(text)
    refuse(copy, rf"model\.safetensors\.index\.json.*{message}", model_impl=impl)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[1]", "must hold a JSON object"),
        (b'{"temperature": "hot"}', "temperature must be"),
        (b'{"temperature": -1}', "temperature must be"),
        (b'{"top_k": 0.5}', "top_k must be"),
        (b'{"max_new_tokens": 0}', "max_tokens must be"),
        (b'{"eos_token_id": "x"}', "eos_token_id must be a token id or a list of them"),
        (b'{"eos_token_id": [null]}', "eos_token_id must be"),
        (b'{"eos_token_id": 1.5}', "eos_token_id must be"),
        (b'{"eos_token_id": true}', "eos_token_id must be"),
        (b'{"eos_token_id": {}}', "eos_token_id must be"),
    ],
)
def test_a_broken_generation_config_is_refused_by_file_and_field(copy, text, message):
    (copy / "generation_config.json").write_bytes(text)
    refuse(copy, rf"generation_config\.json.*{message}")


@pytest.mark.parametrize("positions", [-5, 0, 10**12])
@IMPLS
def test_a_number_of_positions_that_cannot_be_is_refused_by_file_and_field(copy, positions, impl):
    edit_config(copy, max_position_embeddings=positions)
    refuse(copy, rf"config\.json: max_position_embeddings must .*, got {positions}$", model_impl=impl)


@pytest.mark.parametrize("factor", [1e9, -1.0, 0.0, float("nan"), "4"])
@IMPLS
def test_a_rope_factor_that_cannot_be_is_refused_by_file_and_field(copy, factor, impl):
    edit_config(copy, rope_parameters={**YARN, "factor": factor}, rope_scaling={**YARN, "factor": factor})
    refuse(copy, r"config\.json: rope's factor.* must be above 0", model_impl=impl)


def test_an_unknown_activation_is_refused_by_file_and_field(copy):
    edit_config(copy, hidden_act="gulu")
    refuse(copy, r"config\.json's hidden_act 'gulu' is unknown")
    refuse(copy, r"hidden_act 'gulu' is not supported; supported: silu", model_impl="nanoengine")


def test_whatever_transformers_makes_of_an_unsound_config_is_a_value_error(copy):
    edit_config(copy, num_attention_heads=0)
    for impl in ("nanoengine", "transformers"):
        refuse(copy, "the config asks for|cannot be loaded: ZeroDivisionError", model_impl=impl)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64", "float8_e4m3fn"])
@IMPLS
def test_weights_that_are_no_plain_floats_are_refused_rather_than_cast(copy, dtype, impl):
    name = "model.layers.0.mlp.up_proj.weight"
    edit(copy, lambda t: t.update({name: t[name].to(getattr(torch, dtype))}))
    refuse(copy, rf"holds tensor '{name}' as .*; a weight must be one of F64, F32", model_impl=impl)


@pytest.mark.parametrize("scheme", ["hqq", "aqlm", "modelopt", "never heard of"])
@IMPLS
def test_unsupported_quantization_is_refused_by_name(copy, scheme, impl):
    edit_config(copy, quantization_config={"quant_method": scheme, "bits": 4})
    refuse(
        copy,
        f"cannot be served: its weights are quantized with {scheme}; supported: gptq, awq",
        model_impl=impl,
    )


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "config.json says gptq, but no"),
        ("quantize_config.json", {"bits": 3}, "quantized with gptq, and its bits is 3; supported: 4, 8"),
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "NVFP4"}},
            "quantized with NVFP4; supported",
        ),
    ],
)
def test_a_quantization_stated_in_a_separate_file_is_read(copy, file, content, words):
    (copy / file).write_text(json.dumps(content))
    refuse(copy, words)


def served_like(path, model):
    """Greedy tokens of the checkpoint equal those of the transformers model."""
    prompts = random_prompts([5, 40])
    with LLM(str(path), num_kv_blocks=20, block_size=8, dtype="float32", model_impl="auto") as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
    assert [out.outputs[0].token_ids for out in outputs] == [greedy(model, p, 10) for p in prompts]


@pytest.mark.skipif(transformers.__version__ < "5", reason="dequantizes to bfloat16 alone there")
def test_mxfp4_weights_are_served_dequantized(tmp_path):
    """The oracle dequantizes by the format's definition: 32 values of 4 bits share an exponent."""
    model = hf_model("gpt-oss")
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

    def quantize(tensors):
        for name in quantized:
            tensors.pop(name.removesuffix("_blocks"), None)
        tensors.update(quantized)

    assert len(quantized) == 8
    edit(tmp_path, quantize)
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    served_like(tmp_path, model)


ELSEWHERE = torch.device("meta")  # the one device besides the CPU that every machine has; it holds no numbers


def loaded_on(device, path, **settings):
    """transformers' model as it comes from it, before anything else could move it."""
    config = EngineConfig(model=str(path), model_impl="transformers", **settings)
    opened = open_checkpoint(config.model, model_impl="transformers")
    return _load_transformers(opened, config, torch.bfloat16, torch.device(device))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("name", HF_ARCHITECTURES)
def test_transformers_fills_a_model_on_its_device_and_not_on_the_host_first(
    name, load_format, tmp_path_factory
):
    path, model = checkpoint(name, tmp_path_factory)
    loaded = loaded_on(ELSEWHERE, path, load_format=load_format)
    assert {x.device for x in (*loaded.parameters(), *loaded.buffers())} == {ELSEWHERE}
    assert {name: x.shape for name, x in loaded.named_parameters()} == {
        name: x.shape
        for name, x in model.named_parameters()  # tied ones once
    }


def test_without_accelerate_a_model_is_filled_on_the_host_since_transformers_knows_no_other_way(
    tmp_path_factory, monkeypatch
):
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
    """MiB that the host takes at most to load a model of float32 as bfloat16, and MiB of the model."""
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


def test_a_mask_that_an_old_checkpoint_saved_as_booleans_is_no_weight(tmp_path, tmp_path_factory):
    path, model = checkpoint("gpt2", tmp_path_factory)
    shutil.copytree(path, tmp_path / "model")
    edit(tmp_path / "model", lambda t: t.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8).bool()}))
    with LLM(str(tmp_path / "model"), num_kv_blocks=8) as llm:
        output = llm.generate([7, 8], SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
    assert output[0].outputs[0].token_ids == greedy(model, [7, 8], 10)


@pytest.mark.parametrize("name", ["GemmaForCausalLM", "Qwen3ForSequenceClassification"])
def test_a_config_of_another_architecture_than_it_names_is_refused(copy, name):
    edit_config(copy, architectures=[name])
    refuse(copy, f"{name} cannot be served: its config is that of Qwen3ForCausalLM", runner="generate")
    refuse(copy, f"'{name}' is not supported; supported: Llama", model_impl="nanoengine", runner="generate")


def test_a_classifier_without_its_head_is_refused(copy):
    edit_config(copy, architectures=["Qwen3ForSequenceClassification"])
    refuse(copy, "lacks tensor 'score.weight', the classifier's head")


@IMPLS
def test_an_unknown_rope_type_is_refused_with_its_name(copy, impl):
    rope = {"rope_type": "helix", "type": "helix", "rope_theta": 1e4, "factor": 2.0}
    edit_config(copy, rope_parameters=rope, rope_scaling=rope)
    refuse(copy, "helix", model_impl=impl)


def test_code_that_comes_with_a_checkpoint_is_not_run_unless_trusted(copy):
    (copy / "mine.py").write_text("raise AssertionError('ran')")
    mine = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}
    edit_config(copy, auto_map=mine, model_type="mine", architectures=["MyModel"])
    refuse(copy, "trust_remote_code")
    refuse(copy, "cannot be used: ran", trust_remote_code=True)


def test_a_failed_load_keeps_no_memory(copy):
    edit(copy, lambda t: t.pop("lm_head.weight"))
    for impl in ("nanoengine", "transformers"):
        refuse(copy, "lacks 1 tensors", model_impl=impl)
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) in (Decoder, HFModel)]


def test_dummy_weights_need_only_a_config(copy):
    for file in copy.iterdir():
        if file.name != "config.json":
            file.unlink()
    with LLM(str(copy), load_format="dummy", num_kv_blocks=8, dtype="bfloat16") as llm:
        assert llm.get_tokenizer() is None
        output = llm.generate([1, 2, 3], SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0]
        assert (len(output.token_ids), output.text) == (4, "")
        with pytest.raises(ValueError, match="no tokenizer"):
            llm.generate("text", use_tqdm=False)
        with pytest.raises(ValueError, match="stop needs a tokenizer"):
            llm.generate([1], SamplingParams(stop="x"), use_tqdm=False)


def test_dtype_auto_is_the_checkpoints_own(copy):
    edit_config(copy, dtype="bfloat16")
    with LLM(str(copy), num_kv_blocks=4) as llm:
        assert llm.llm_engine.runner.model.norm.weight.dtype == torch.bfloat16
        assert llm.llm_engine.runner.caches[0].k.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["int8", "float64", "bf16", torch.int32])
def test_an_unknown_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match="dtype must be auto, bfloat16"):
        resolve_dtype(dtype, None)


def test_every_eos_id_of_the_generation_config_is_known(copy):
    (copy / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [5, 9], "temperature": 0.3, "max_new_tokens": 77})
    )
    edit_config(copy, eos_token_id=[7, 500, -1])  # the last two are no tokens
    _tokenizer_with_eos(3).save_pretrained(copy)
    with LLM(str(copy), num_kv_blocks=4) as llm:
        assert llm.llm_engine.checkpoint.eos_token_ids == (3, 7, 5, 9)
        params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_p, params.max_tokens) == (0.3, 1.0, 77)


def _tokenizer_with_eos(eos_id):
    vocabulary = {f"t{i}": i for i in range(10)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=f"t{eos_id}")


def test_different_seeds_give_different_dummy_weights(copy):
    weights = []
    for seed in (0, 0, 1):
        with LLM(str(copy), load_format="dummy", num_kv_blocks=4, seed=seed) as llm:
            weights.append(llm.llm_engine.runner.model.lm_head.weight.clone())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def length(family, **changes):
    config = getattr(transformers, f"{family}Config")(**{**TINY, **changes})
    return Checkpoint(Path(), config, None, None, (), {}).max_model_len


def test_a_model_is_made_for_the_positions_its_yarn_factor_gives_or_more():
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    assert length("Llama") == 512
    assert length("Llama", max_position_embeddings=64, rope_parameters=yarn) == 256
    assert length("Llama", max_position_embeddings=1024, rope_parameters=yarn) == 1024


def test_rope_types_that_change_with_the_length_are_served_up_to_where_they_change(tmp_path):
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    long_rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
        **factors,
    }
    assert length("Phi3", rope_parameters=long_rope, original_max_position_embeddings=64) == 64
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    assert length("Llama", rope_parameters=dynamic) == 512


def test_a_model_that_does_not_say_how_long_it_may_be_asks_for_max_model_len(copy, monkeypatch):
    monkeypatch.setattr(Checkpoint, "max_model_len", None)
    refuse(copy, "max_model_len must be given")
    with LLM(str(copy), num_kv_blocks=4, max_model_len=100) as llm:
        assert llm.llm_engine.max_model_len == 100
