"""nanoengine in vLLM's place: the logic of vLLM's own example scripts, importing vllm as they do.

`alphabet` goes on with the alphabet from the last letter of the prompt.
"""

import argparse
import importlib
import importlib.metadata
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from nanoengine import LLM, compat
from nanoengine.contrib import vllm_module
from tests.helpers import DEMO, byte_tokenizer

ROOT = DEMO.parent.parent
PROMPTS = ["Hello, my name is", "The president of", "The capital of Franc", "The future of A"]
NAMES = {
    "vllm": "LLM SamplingParams EngineArgs AsyncEngineArgs LLMEngine AsyncLLMEngine RequestOutput TextPrompt",
    "vllm.config": "VllmConfig",
    "vllm.distributed": "cleanup_dist_env_and_memory",
    "vllm.distributed.parallel_state": "cleanup_dist_env_and_memory",
    "vllm.distributed.weight_transfer.nccl_common": "trainer_init",
    "vllm.distributed.weight_transfer.packed_tensor": "packed_nccl_broadcast_producer",
    "vllm.engine.arg_utils": "EngineArgs AsyncEngineArgs",
    "vllm.engine.async_llm_engine": "AsyncLLMEngine",
    "vllm.engine.llm_engine": "LLMEngine",
    "vllm.entrypoints.chat_utils": "resolve_hf_chat_template",
    "vllm.entrypoints.llm": "LLM",
    "vllm.inputs": "TextPrompt TokensPrompt",
    "vllm.logger": "init_logger",
    "vllm.logprobs": "Logprob",
    "vllm.lora.request": "LoRARequest",
    "vllm.outputs": "CompletionOutput RequestOutput",
    "vllm.pooling_params": "PoolingParams",
    "vllm.renderers.hf": "resolve_chat_template",
    "vllm.sampling_params": "SamplingParams RequestOutputKind StructuredOutputsParams GuidedDecodingParams",
    "vllm.sequence": "Logprob",
    "vllm.tokenizers": "get_tokenizer",
    "vllm.transformers_utils.tokenizer": "get_tokenizer",
    "vllm.utils": "FlexibleArgumentParser random_uuid",
    "vllm.utils.argparse_utils": "FlexibleArgumentParser",
    "vllm.utils.network_utils": "get_ip",
    "vllm.utils.print_utils": "print_embeddings",
    "vllm.v1.engine.async_llm": "AsyncLLM",
    "vllm.v1.engine.llm_engine": "LLMEngine",
    "vllm.v1.metrics.reader": "Counter Gauge Histogram Vector Metric",
    "vllm.v1.sample.logits_processor": "AdapterLogitsProcessor BatchUpdate LogitsProcessor",
    "vllm.v1.sample.logits_processor.builtin": "process_dict_updates",
    "vllm.v1.sample.logits_processor.interface": "MoveDirectionality",
}


@pytest.fixture
def no_vllm(monkeypatch):
    """Remove `install`'s effects after the test."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture
def vllm_installed(no_vllm):
    vllm_module.install()


# ---- the place ----


def test_names_that_scripts_import_exist(vllm_installed):
    assert NAMES.keys() == vllm_module.MODULES.keys()
    for module, names in NAMES.items():
        for name in names.split():
            assert getattr(importlib.import_module(module), name) is not None
    import vllm

    assert vllm.v1.metrics.reader.Counter is not None  # without an import of its own
    assert vllm.LLM is LLM


def test_a_missing_name_is_an_error_that_names_it(vllm_installed):
    with pytest.raises(ImportError, match="cannot import name 'PipelineParams' from 'vllm'"):
        from vllm import PipelineParams  # noqa: F401
    with pytest.raises(ImportError, match=r"cannot import name 'cdiv' from 'vllm\.utils'"):
        from vllm.utils import cdiv  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"'vllm\.platforms'"):
        import vllm.platforms
    with pytest.raises(ImportError, match="'compat'"):
        from vllm import compat  # noqa: F401 (which is nanoengine's, and no name of vLLM's)
    import vllm

    with pytest.raises(AttributeError, match=r"no vllm\.envs"):
        _ = vllm.envs
    assert find_spec("vllm.platforms") is None


def test_vllm_is_an_installed_distribution_with_a_version(vllm_installed):
    import vllm

    assert importlib.metadata.version("vllm") == vllm.__version__
    assert vllm.__version__.startswith("0.33.0+nanoengine")
    assert "vllm" in [one.metadata["Name"] for one in importlib.metadata.distributions()]
    assert find_spec("vllm") is not None
    assert importlib.metadata.version("pytest") == pytest.__version__


def test_an_installed_vllm_is_not_shadowed_without_shadow(no_vllm, tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("is_real = True")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="installed: pass shadow=True to hide it"):
        vllm_module.install()
    vllm_module.install(shadow=True)
    vllm_module.install()  # again is nothing
    import vllm

    assert not hasattr(vllm, "is_real")


def test_a_vllm_that_is_imported_is_never_shadowed(no_vllm, tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    import vllm  # noqa: F401

    with pytest.raises(ImportError, match="imported already"):
        vllm_module.install(shadow=True)


def test_a_script_and_a_module_run_with_their_arguments_before_anything_heavy_is_imported(tmp_path):
    (tmp_path / "beside.py").write_text("said = 'beside'")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside, vllm\nfrom vllm.utils import FlexibleArgumentParser\n"
        "print(__name__, sys.argv[1:], beside.said, vllm.__version__, 'torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for how in ([str(script)], ["-m", "script"], ["--shadow", "-m", "script"]):
        command = [sys.executable, "-m", "nanoengine.contrib.vllm_module", *how, "-x", "--y"]
        folder = ROOT if how[0] == str(script) else tmp_path
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert run.stdout.startswith("__main__ ['-x', '--y'] beside 0.33.0+nanoengine"), run.stderr
        assert run.stdout.endswith("False\n")
    run = subprocess.run(command[:3], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1
    assert "python -m nanoengine.contrib.vllm_module script.py" in run.stderr


def test_helpers_behave_like_vllm_s(vllm_installed, alphabet, babbler):
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.logger import init_logger
    from vllm.lora.request import LoRARequest
    from vllm.renderers.hf import resolve_chat_template
    from vllm.tokenizers import get_tokenizer
    from vllm.utils import random_uuid

    cleanup_dist_env_and_memory()
    assert len({random_uuid() for _ in range(9)}) == 9
    assert int(random_uuid(), 16) < 2**128
    assert init_logger("a.b").name == "a.b"
    tokenizer = get_tokenizer(alphabet, tokenizer_mode="auto", trust_remote_code=False, revision=None)
    assert tokenizer("a").input_ids == byte_tokenizer()("a").input_ids
    with pytest.raises(ValueError, match="tokenizer_mode must be auto or hf, got 'mistral'"):
        get_tokenizer(alphabet, tokenizer_mode="mistral")
    assert resolve_chat_template(tokenizer, None, None, model_config=None) == tokenizer.chat_template
    assert resolve_chat_template(tokenizer, "mine", None, model_config=None) == "mine"
    assert resolve_chat_template(get_tokenizer(babbler), None, None, model_config=None) is None
    with LLM(alphabet) as llm, pytest.raises(ValueError, match="the adapter is merged into the weights"):
        llm.generate("a", lora_request=LoRARequest("finetuned", 1, "a/path"))


# ---- EngineArgs on a command line ----


def test_every_parser_argument_is_accepted_by_an_engine_at_its_default(vllm_installed):
    from vllm import EngineArgs
    from vllm.utils import FlexibleArgumentParser

    args = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--model", "m"])
    assert vars(args).keys() >= compat.INSTEAD.keys()
    assert (args.pipeline_parallel_size, args.enable_lora, args.tensor_parallel_size) == (1, False, 1)
    assert EngineArgs(**vars(args)) == EngineArgs.from_cli_args(args) == EngineArgs(model="m")


def test_command_line_settings_take_effect_or_are_refused_by_name(vllm_installed, capsys):
    from vllm import EngineArgs
    from vllm.utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--max-tokens", type=int)
    parser.set_defaults(model="m", enforce_eager=True)
    line = "--max_model_len 32 --no-enable-prefix-caching --max_tokens=5 --num-gpu-blocks-override 9"
    args = parser.parse_args(line.split())
    asked = {"max_model_len": 32, "enable_prefix_caching": False, "num_kv_blocks": 9, "enforce_eager": True}
    assert EngineArgs.from_cli_args(args) == EngineArgs(model="m", **asked)
    assert args.max_tokens == 5
    for flags, message in (
        ("--enable-lora", "enable_lora=True is not supported; pass lora"),
        ("--pipeline-parallel-size 2", "pipeline_parallel_size=2 is not supported"),
        ("--kv-cache-dtype fp8", "argument --kv-cache-dtype: invalid choice: 'fp8'"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(flags.split())
        assert message in capsys.readouterr().err
    with pytest.raises(TypeError, match="model"):
        EngineArgs.from_cli_args(argparse.Namespace(seed=1))


# ---- vLLM's examples ----


def test_the_generate_example(vllm_installed, alphabet):
    """Flags in a group, and parameters that flags change."""
    from vllm import LLM, EngineArgs
    from vllm.utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    engine_group = parser.add_argument_group("Engine arguments")
    EngineArgs.add_cli_args(engine_group)
    engine_group.set_defaults(model="another/model")
    parser.add_argument_group("Sampling parameters").add_argument("--max-tokens", type=int)
    args = vars(parser.parse_args(["--model", alphabet, "--max-tokens", "3"]))
    max_tokens = args.pop("max_tokens")
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature = max_tokens, 0
    outputs = llm.generate(PROMPTS, params)
    llm.shutdown()
    assert [output.prompt for output in outputs] == PROMPTS
    assert [output.outputs[0].text for output in outputs] == ["tuv", "ghi", "def", "\x00" * 3]


def test_the_embed_and_score_examples(vllm_installed, capsys):
    from vllm import LLM, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.utils.print_utils import print_embeddings

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model=str(DEMO), runner="pooling", enforce_eager=True)
    llm = LLM(**vars(parser.parse_args(["--max-model-len", "64"])))
    for prompt, output in zip(PROMPTS, llm.embed(PROMPTS), strict=True):
        print(f"Prompt: {prompt!r}")
        print_embeddings(output.outputs.embedding)
    printed = capsys.readouterr().out
    assert printed.count("size=") == 4
    scores = [output.outputs.score for output in llm.score("What is it?", ["What is it?", "zzz"])]
    assert scores[0] == pytest.approx(1) != scores[1]
    llm.shutdown()


def test_the_llm_engine_example(vllm_installed, babbler):
    from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description="the engine, by hand"))
    args = parser.parse_args(["--model", babbler, "--num-kv-blocks", "40", "--max-model-len", "100"])
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    assert engine.model_config.max_model_len == 100
    assert engine.model_config.hf_config.vocab_size == engine.checkpoint.vocab_size
    prompts = [
        ("A robot may not injure", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("What is it?", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
    ]
    finished: list[RequestOutput] = []
    number = 0
    while prompts or engine.has_unfinished_requests():
        if prompts:
            prompt, params = prompts.pop(0)
            engine.add_request(str(number), prompt, params)
            number += 1
        finished += [output for output in engine.step() if output.finished]
    engine.shutdown()
    assert {output.request_id: len(output.outputs) for output in finished} == {"0": 1, "1": 1, "2": 2}
