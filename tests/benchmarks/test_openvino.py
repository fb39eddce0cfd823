"""OpenVINO as an engine of the benchmarks: the checkpoint that it exports, and what it is asked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

import tests.openvino_genai
from benchmarks.openvino import load, prepare
from nanoengine.apps.workloads import SHAPES
from nanoengine.models.checkpoint import open_checkpoint

SHAPE = SHAPES["tiny"] | {"dtype": "bfloat16", "vocab_size": 512}
FORMATS = {"fp32", "fp16", "int8", "int4", "mxfp4", "nf4", "cb4"}  # that `optimum-cli` knows


def optimum_cli(command, check):
    """Stand in for `optimum-cli`: refuse other options than its own, and write the files that it writes."""
    assert check
    program, export, backend, output, *options = command
    assert (Path(program), export) == (Path(sys.executable).parent / "optimum-cli", "export")
    assert (backend, options[::2]) == ("openvino", ["--model", "--task", "--weight-format"])
    model, task, weight_format = options[1::2]
    assert task == "text-generation-with-past"
    assert weight_format in FORMATS
    assert json.loads(Path(model, "config.json").read_text())["model_type"] == "qwen3"
    with safe_open(Path(model, "model.safetensors"), "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers refuses files without it
        assert "model.layers.0.mlp.up_proj.weight" in file.keys()  # noqa: SIM118 (not a dict)
    Path(output).mkdir()  # an error if two engines export to one directory
    for name in ("model", "tokenizer", "detokenizer"):
        Path(output, f"openvino_{name}.xml").write_text(weight_format)


@pytest.fixture
def shape(tmp_path, monkeypatch):
    """Write a config alone, and let the package and its exporter be stand-ins."""
    for name in ("openvino", "openvino_genai"):
        monkeypatch.setitem(sys.modules, name, tests.openvino_genai)
    monkeypatch.setattr(subprocess, "run", optimum_cli)
    monkeypatch.setattr(tests.openvino_genai.ContinuousBatchingPipeline, "made", [])
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path


def prepared(model, directory, **changes):
    """Prepare a model for OpenVINO as the benchmark does."""
    settings = {"model": str(model), "load_format": "dummy", "dtype": "bfloat16", "threads": 2}
    return prepare(open_checkpoint(str(model)), settings | {"device": "cpu"} | changes, str(directory))


def test_each_weight_format_is_exported_from_one_checkpoint_and_serves_the_same_token_ids(shape):
    prompts, output_lens = [[1, 2, 3], [500], [7] * 300], [5, 8, 12]
    for kind, weight_format in ((None, "fp16"), ("int8", "int8"), ("int4", "int4")):
        settings = prepared(shape, shape, weight_type=kind)
        assert len(AutoTokenizer.from_pretrained(settings["model"])) == 512
        measured = load(settings)(prompts, output_lens)
        pipeline = tests.openvino_genai.ContinuousBatchingPipeline.made[-1]
        assert Path(pipeline.models_path, "openvino_model.xml").read_text() == weight_format
        assert pipeline.prompts == prompts
        assert pipeline.properties == {"INFERENCE_NUM_THREADS": 2}
        assert not pipeline.scheduler_config.enable_prefix_caching
        assert pipeline.scheduler_config.max_num_seqs == 256
        assert pipeline.num_steps == 12
        assert [measured["output_tokens"], len(measured["ttft"]), len(measured["itl"])] == [25, 3, 22]


def test_openvino_limited_to_avx2_gets_the_settings_with_which_it_runs(shape, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert load(prepared(shape, shape))([[1, 2]], [3])["output_tokens"] == 3


def test_a_checkpoint_is_exported_as_it_is(tmp_path, qwen3):
    settings = prepared(qwen3, tmp_path, load_format="auto", dtype="float32")
    assert (settings["model"], settings["weight_format"]) == (str(qwen3), "fp32")
    assert not list(tmp_path.iterdir())
