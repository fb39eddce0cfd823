"""The public names, and what importing them loads."""

import ast
import importlib
import os
import re
import subprocess
import sys
from collections import deque
from importlib.metadata import version

import pytest

import nanoengine
from nanoengine import LLM, SamplingParams
from tests.helpers import DEMO
from tests.test_structure import FILES, PACKAGE, nodes_of


def test_public_names_are_exactly_these():
    names = "AsyncEngineArgs AsyncLLM AsyncLLMEngine CompletionOutput EngineArgs EngineConfig "
    names += "LLM LLMEngine Logprob RequestMetrics RequestOutput RequestOutputKind "
    names += "SamplingParams StructuredOutputsParams TextPrompt TokensPrompt __version__"
    assert sorted(nanoengine.__all__) == names.split()
    for name in nanoengine.__all__:
        assert getattr(nanoengine, name) is not None
        assert name in dir(nanoengine)
    with pytest.raises(AttributeError, match="has no attribute 'Llm'"):
        _ = nanoengine.Llm


IMPORTS = """
import runpy, sys
from nanoengine.engine import BlockManager
print(*sys.modules)
from nanoengine import LLM
print(*sys.modules)
assert LLM("demo", max_num_seqs=1).generate("Hello", use_tqdm=False)
print(*sys.modules)
runpy.run_path("example.py", run_name="__main__")
print(*sys.modules)
"""


@pytest.fixture(scope="module")
def example():
    """Return what `example.py` prints, and the names of the modules imported before it and by it."""
    run = ["env", "OMP_NUM_THREADS=1", sys.executable, "-c", IMPORTS]  # threads that share a core spin
    lines = subprocess.check_output(run, text=True, cwd=PACKAGE.parent).splitlines()
    return "\n".join(lines[3:-1]), [lines[place].split() for place in (0, 1, 2, -1)]


def test_example_prints_the_right_answers(example):
    questions_and_answers = example[0].strip().split("\n\n")
    assert [re.search("^A: (.*)", one, re.MULTILINE)[1] for one in questions_and_answers[1:]] == [
        "27 + 58 = 85",
        "noitnetta",
        "The hungry fox stole the red apple behind a market.",
        " ".join(map(str, range(8, 22))),
    ]
    assert "Q (19 tokens): What is 27 + 58?" in example[0]


def test_modules_are_imported_only_when_needed(example):
    scheduler, llm, answer, script = example[1]

    def ours(*names):
        return tuple(f"nanoengine.{name}" for name in names)

    unwanted = "transformers", *ours("models", "checkpoints", "llm", "requests")
    unwanted += ours("backends.cpu", "backends.cuda", "backends.flash", "backends.triton")
    assert "nanoengine.engine" in scheduler
    assert not [name for name in scheduler if name.startswith(unwanted)]
    unwanted = ours("cli", "server", "extensions", "lab", "viewer", "backends.cuda")
    assert "nanoengine.llm_engine" in llm
    assert not [name for name in llm if name.startswith(unwanted)]
    # transformers' own models, and what their configs import, take a second.
    assert not {"nanoengine.models.hf", "transformers.activations"}.intersection(llm)
    if version("transformers") >= "5.22":  # an older one imports it with GenerationMixin
        assert "torch._dynamo" not in answer, "PyTorch's compiler takes seconds"
    assert "nanoengine.checkpoints.download" not in script, "not needed for a local model"
    assert "llguidance" not in answer
    assert not [name for name in script if name.startswith(unwanted)]
    names = [name.removeprefix("nanoengine.") for name in answer if name.startswith("nanoengine.")]
    assert sum(len(FILES[name].read_text().splitlines()) for name in names) <= 7050


def test_type_checkers_see_the_public_names():
    nodes = ast.parse((PACKAGE / "__init__.py").read_text()).body
    block = next(node for node in nodes if isinstance(node, ast.If))
    assert {node.module for node in block.body} == {f"nanoengine.{name}" for name in nanoengine._NAMES}
    for name, module in nanoengine._MODULE_OF.items():  # defined there, and not only imported
        source = (PACKAGE / f"{module.replace('.', '/')}.py").read_text()
        assert re.search(rf"^(class {name}\b|(\w+ = )*{name} = )", source, re.MULTILINE)


USER = """
from nanoengine import LLM, AsyncLLM, EngineConfig, SamplingParams
llm = LLM("demo", max_num_seqs=4, quantization="int8", lora=None)
AsyncLLM(model="demo", max_concurrent_requests=4, scheduling_policy="priority")
EngineConfig("demo", dtype="bfloat16")
text: str = llm.generate("Hello", SamplingParams(temperature=0.5))[0].outputs[0].text
LLM("demo", max_num_sqs=4)  # wrong
LLM("demo", max_num_seqs="four")  # wrong
LLM("demo", quantization="int7")  # wrong
AsyncLLM("demo", max_concurrent_requests="4")  # wrong
AsyncLLM("demo", trust_remote_kode=True)  # wrong
EngineConfig("demo", attn_backend="falsh")  # wrong
EngineConfig("demo", sed=1)  # wrong
SamplingParams(temprature=0.5)  # wrong
SamplingParams(stop=5)  # wrong
number: int = llm.generate("Hello")[0].outputs[0].text  # wrong
"""


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_type_checkers_find_a_wrong_name_and_a_wrong_type_in_a_script(checker, tmp_path):
    pytest.importorskip(checker, reason=f"pip install {checker}")
    (tmp_path / "script.py").write_text(USER)
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*,transformers.*]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", checker, "script.py"]
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"MYPYPATH": str(PACKAGE.parent), "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    found = {int(line) for line in re.findall(r"script\.py:(\d+):.* error: ", done.stdout)}
    wrong = {i for i, line in enumerate(USER.splitlines(), 1) if line.endswith("# wrong")}
    assert found == wrong, done.stdout


OFF = "logging.getLogger('nanoengine').setLevel('WARNING')"


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ("", "", ["nanoengine.part: one", "nanoengine.part: two"]),
        ("", OFF, ["nanoengine.part: two"]),
        (OFF, "", ["nanoengine.part: two"]),
        ("", "logging.basicConfig(format='its own %(message)s')", ["its own one", "its own two"]),
    ],
)
def test_the_log_is_visible_until_the_program_turns_it_off_or_has_a_format_of_its_own(before, after, shown):
    code = f"import logging; {before}\nimport nanoengine; {after}\nlog = logging.getLogger('nanoengine.part')"
    code += "; log.debug('zero'); log.info('one'); log.warning('two')"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr.splitlines()) == ("", shown)


def shared_state() -> dict[str, str]:
    """Return every mutable value that a module or a class of nanoengine holds."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("nanoengine"):
            continue
        for name, value in vars(module).items():
            owned = (getattr(value, "__module__", "") or "").startswith("nanoengine")
            members = vars(value) if isinstance(value, type) and owned else {"": value}
            for member, held in members.items():
                if isinstance(held, (list, dict, set, bytearray, deque)) and not member.startswith("__"):
                    found[f"{module_name}.{name}.{member}"] = repr(held)
                elif isinstance(value, type):
                    found[f"{module_name}.{name}.{member}"] = str(id(held))
    return {name: held for name, held in found.items() if ".__" not in name}


def test_no_state_lives_outside_objects(tmp_path_factory):
    """Engines share nothing: modules and classes hold the same values after several have run."""
    for path in PACKAGE.rglob("*.py"):
        assert not [node for node in nodes_of(path) if isinstance(node, (ast.Global, ast.Nonlocal))]
    LLM(DEMO, num_kv_blocks=20).close()  # imports the modules that every engine needs
    for name in ("models.hf", "backends.int8_cache", "sampling.drawing"):
        importlib.import_module(f"nanoengine.{name}")
    before = shared_state()
    assert "nanoengine.models.load.FUSED." in before
    for settings in ({}, {"model_impl": "transformers"}, {"async_scheduling": True, "enforce_eager": True}):
        with LLM(DEMO, num_kv_blocks=20, dtype="bfloat16", **settings) as llm:
            llm.generate(["a", "b"], SamplingParams(logprobs=1, n=2), use_tqdm=False)
            assert shared_state() == before
    assert shared_state() == before
