"""The command `nanoengine`, the wheel and the source distribution."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

import nanoengine
from nanoengine import LLM
from nanoengine.__main__ import COMMANDS, main
from tests.helpers import DEMO
from tests.serving import TIMEOUT

ROOT = Path(__file__).parent.parent


def test_list_of_commands_needs_neither_pytorch_nor_an_extra():
    code = "import sys; from nanoengine.__main__ import main\nmain([])\ntry: main(['--help'])\nfinally: "
    code += "print([name for name in sys.modules if name in ('torch', 'numpy', 'fastapi')], file=sys.stderr)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.stderr.strip() == "[]"
    for name, what in COMMANDS.items():
        assert len(re.findall(rf"^ +{name} +{re.escape(what)}$", run.stdout, re.MULTILINE)) == 2


def test_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # makes its import fail
    monkeypatch.delitem(sys.modules, "nanoengine.server.lifecycle", raising=False)
    with pytest.raises(SystemExit):
        main(["serve", "demo"])
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(SystemExit) as ended:
        main(["run", "--kv-store", "redis://localhost/0"])
    assert ended.value.code == 2
    serve, run = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert serve == "nanoengine: error: nanoengine serve needs uvicorn: pip install 'nanoengine[serve]'"
    assert run.endswith("a KV store in Redis needs redis-py: pip install 'nanoengine[redis]'")


def test_command_gets_the_arguments_after_its_name(monkeypatch, capsys):
    given = []
    modules = "cli.run", "cli.chat", "server.lifecycle", "cli.bench", "viewer.trace_page", "cli.lab"
    for module in modules:
        monkeypatch.setattr(f"nanoengine.{module}.main", partial(lambda *call: given.append(call), module))
    for name in COMMANDS:
        main([name, "--help", name])
    assert given == [(module, ["--help", name]) for module, name in zip(modules, COMMANDS, strict=True)]
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"{nanoengine.__version__}\n"


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Return a folder with a checkpoint without a tokenizer."""
    ignored = shutil.ignore_patterns("tokenizer*", "*.jinja")
    return shutil.copytree(DEMO, tmp_path_factory.mktemp("without") / "tokenizer", ignore=ignored)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sreve", "did you mean serve?"),
        ("--vresion", "did you mean --version?"),
        ("serve demo --prot 80", "did you mean --port?"),
        ("serve demo --attn_backend=falsh", "did you mean flash?"),
        ("serve demo --enable-prefx-caching", "did you mean 'enable_prefix_caching'?"),
        ("serve demo --no-enable_prefx_caching", "did you mean 'enable_prefix_caching'?"),
        ("serve demo --max-num-seq=0", "did you mean 'max_num_seqs'?"),
        ("serve demo --model demo", "give the model once"),
        ("serve demo --kv-cache-dtype fp8", "argument --kv-cache-dtype: invalid choice: 'fp8'"),
        ("serve demo --ssl_keyfile=key.pem", "ssl_keyfile='key.pem' is not supported"),
        ("serve demo --enable-lora", "enable_lora=True is not supported; pass lora=..."),
        ("serve demo --such-flag", "such_flag=True is not supported"),
        ("serve --port=99999", "argument --port: must be an integer in [0, 65535], got '99999'"),
        ("serve --port=-1", "argument --port: must be an integer in [0, 65535], got '-1'"),
        ("serve --port=http", "argument --port: must be an integer in [0, 65535], got 'http'"),
        ("serve demo --max-num-seqs 0", "max_num_seqs must be an integer in [1, 2147483647], got 0"),
        ("serve demo --hf-overrides {a", "--hf-overrides: must be JSON, got '{a'"),
        ("serve /no/such/model", "'/no/such/model' is neither a directory nor a hub id"),
        ("serve demo --tool-call-parser hermse", "did you mean hermes?"),
        ("serve demo --drain-seconds nan", "drain_seconds must be a number in [0, inf], got nan"),
        ("serve demo --allowed-origins [1]", "allowed_origins must hold strings only, got 1"),
        ("bench --workload decoed", "did you mean decode?"),
        ("bench --model /no/such/model", "'/no/such/model' is neither a directory nor a hub id"),
        ("bench --threads 0", "must be at least 1"),
        ("chat BARE", "has no chat template, so it cannot hold a conversation"),
        ("chat demo --max-model-length 9", "did you mean 'max_model_len'"),
        ("chat demo --hf-overrides [1]", "hf_overrides must be a dict"),
        ("run BARE", "the checkpoint has no tokenizer"),
        ("run demo --model demo", "give the model once: nanoengine run MODEL"),
        ("run --max-tokens 0", "max_tokens must be"),
        ("run --trace run.txt", "a trace must end in .html, .json or .jsonl, got run.txt"),
        ("trace --ouput x.html", "did you mean 'output'?"),
        ("trace /no/such.jsonl -o x.html", "No such file or directory: '/no/such.jsonl'"),
        ("lab --rat 5 --num-requets 3", "did you mean 'num_requests'?"),
        ("lab --rate 1,0", "--rate: the value must be a number in (0, 1000000000000.0], got 0"),
        ("lab --rate x", "could not convert"),
        ("lab --scheduler-cls fcfs,fastest", "must be fcfs, shortest, "),
        ("lab --scheduler-cls json:loads", "must be a subclass"),
        ("lab --max-num-batched-tokens 0", "must be an integer in [1, "),
        ("lab --prompt 9-3", "LOW must be at most HIGH"),
        ("lab --cost 1,2", "three numbers"),
        ("lab --cost 1,-1,1", "three numbers"),
        ("lab --cost 0,1,1", "the first above 0"),
        ("lab --trace /nowhere.jsonl", "/nowhere.jsonl"),
        ("lab --fit model --cost 1,1,1", "not allowed with"),
        ("lab --fit /no/such/model", "'/no/such/model' is neither a directory nor a hub id"),
        ("lab --num-requests 5 --num-kv-blocks 1", "leave room for 33"),
        ("lab --plot /no/such.folder/x.png", "No such file or directory: '/no/such.folder/x.png'"),
    ],
)
def test_a_wrong_use_of_a_command_prints_one_line_and_exits_with_2(line, said, bare, monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)  # for the tests after it
    monkeypatch.setattr("nanoengine.lab.simulation.Simulation.step", None)  # nothing runs
    with pytest.raises(SystemExit) as ended:
        main(line.replace("BARE", str(bare)).split())
    (printed,) = capsys.readouterr().err.splitlines()
    assert printed.startswith("nanoengine")
    assert said in printed
    assert ended.value.code == 2


def test_serve_refuses_an_address_in_use_before_it_loads_the_model(monkeypatch, capsys):
    monkeypatch.setattr("nanoengine.server.lifecycle.AsyncLLM", Mock(side_effect=AssertionError))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            main(["serve", "--port", str(port)])
    expected = f"nanoengine serve: error: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    assert (ended.value.code, capsys.readouterr().err) == (2, expected)


def test_ctrl_c_ends_a_command_with_130_while_it_loads_and_while_it_runs(monkeypatch, default_sigint):
    """While it loads, at once: inside an import, Python may print a KeyboardInterrupt and go on."""
    before = signal.getsignal(signal.SIGINT)
    press = Mock(side_effect=lambda *_: signal.raise_signal(signal.SIGINT))
    ends = Mock(side_effect=SystemExit(130))
    monkeypatch.setattr("os._exit", ends)
    for loaded in (press, Mock(return_value=press)):
        monkeypatch.setattr("nanoengine.__main__.load", loaded)
        with pytest.raises(SystemExit) as ended:
            main(["lab"])
        assert ended.value.code == 130
        assert ends.call_count == 1  # in the first case only
        assert signal.getsignal(signal.SIGINT) is before


def test_a_command_in_the_background_of_a_shell_ignores_ctrl_c_while_it_loads(monkeypatch, default_sigint):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    load = Mock(side_effect=lambda *_: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr("nanoengine.__main__.load", Mock(side_effect=lambda *_: load() or Mock()))
    monkeypatch.setattr("os._exit", Mock(side_effect=AssertionError))
    main(["lab"])
    assert (load.call_count, signal.getsignal(signal.SIGINT)) == (1, signal.SIG_IGN)


def test_demo_is_the_bundled_model_in_any_folder(tmp_path, monkeypatch):
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    with LLM("demo", tokenizer="demo", num_kv_blocks=9) as llm:
        assert llm.llm_engine.checkpoint.path == DEMO


def test_wheel_contains_every_file_of_the_package():
    """The lists of folders and data files in pyproject.toml are complete."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent for path in DEMO.parent.rglob("*.py")}
    assert set(listed["packages"]) == {".".join(path.relative_to(ROOT).parts) for path in folders}
    for folder in folders:
        patterns = ("*.py", *listed["package-data"].get(".".join(folder.relative_to(ROOT).parts), ()))
        packaged = {path for pattern in patterns for path in folder.glob(pattern)}
        assert packaged >= {path for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a folder with a wheel and a source distribution of the files under version control."""
    where = tmp_path_factory.mktemp("built")
    command = ["git", "ls-files", "-coz", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if files.returncode != 0:
        pytest.skip("no git checkout to build from")
    for name in files.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (where / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, where / "source" / name)
    backend = "from setuptools import build_meta as b; b.build_wheel('..'); b.build_sdist('..')"
    env = os.environ | {"CXX": f"{os.environ.get('CXX', 'g++')} -O0"}  # takes a third of the time
    command = [sys.executable, "-c", backend]
    subprocess.run(command, cwd=where / "source", env=env, check=True, capture_output=True)
    assert not list((where / "source").rglob("*.so"))
    return where


@pytest.mark.slow
def test_wheel_holds_these_files_and_says_what_it_is_and_needs(built):
    name = f"nanoengine-{nanoengine.__version__}"
    (path,) = built.glob("*.whl")
    assert re.fullmatch(rf"{re.escape(name)}-py3-none-manylinux_2_\d+_x86_64.whl", path.name)
    with zipfile.ZipFile(path) as wheel:
        files = {Path(path) for path in wheel.namelist()}
        said = message_from_bytes(wheel.read(f"{name}.dist-info/METADATA"))
    assert {path.parts[0] for path in files} == {"nanoengine", f"{name}.dist-info"}
    kinds = {path.suffix for path in files if path.parts[0] == "nanoengine"}
    assert " ".join(sorted(kinds)) == ".cpp .css .h .html .jinja .js .json .py .safetensors .so .typed"
    assert Path("nanoengine/py.typed") in files
    assert (said["License-Expression"], said["Author"]) == ("MIT", "nanoengine contributors")
    assert "Typing :: Typed" in said.get_all("Classifier")
    needed = {re.split(r"\W", one)[0] for one in said.get_all("Requires-Dist") if "extra ==" not in one}
    packages = "torch transformers tokenizers safetensors huggingface_hub numpy xxhash tqdm psutil"
    assert needed == set(packages.split())


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Return the `bin` of an environment with the wheel, and with the dependencies of this environment."""
    path = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)
    wheel = next(built.glob("*.whl"))
    command = [sys.executable, "-m", "pip", "--python", path / "bin" / "python", "install", "--no-deps"]
    subprocess.run([*command, "--no-index", wheel], check=True, capture_output=True)
    (site,) = path.glob("lib/python*/site-packages")
    # Not a .pth file, which would also add an editable installation of this checkout.
    outer = sysconfig.get_path("purelib")
    (site / "sitecustomize.py").write_text(f"import sys; sys.path.append({outer!r})\n")
    return path / "bin"


@pytest.fixture
def clean(tmp_path, monkeypatch):
    """Return settings for a process in an empty folder that cannot import this checkout."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return {"cwd": tmp_path, "text": True}


@pytest.mark.slow
def test_wheel_has_a_working_command(installed, tmp_path, clean):
    def run(*command):
        command = [installed / command[0], *command[1:]]
        done = subprocess.run(command, capture_output=True, check=True, **clean)
        return done.stdout + done.stderr

    for arguments in ([], ["--help"]):
        assert "an OpenAI-compatible server" in run("nanoengine", *arguments)
    assert run("nanoengine", "--version") == f"{nanoengine.__version__}\n"
    assert "27 + 58 = 85" in run("python", "-m", "nanoengine")
    lines = "run --trace run.jsonl", "trace run.jsonl -o run.html", "lab --num-requests 9", "bench --help"
    code = f"import nanoengine.__main__ as one; print(one.__file__); [one.main(x.split()) for x in {lines}]"
    where, _, printed = run("python", "-c", code).partition("\n")  # one process imports PyTorch once
    assert where.startswith(str(installed.parent))
    assert (tmp_path / "run.html").stat().st_size > 10_000
    for said in "27 + 58 = 85", "9 requests", "goodput", "share of the machine's roofline":
        assert said in printed


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--kv-cache-dtype=int8", "--batch-invariant"]])
def test_the_wheel_has_kernels_for_a_machine_without_a_compiler(options, installed, tmp_path, clean):
    env = {"PATH": str(installed), "XDG_CACHE_HOME": str(tmp_path)}
    command = [installed / "nanoengine", "run", *options]
    done = subprocess.run(command, env=env, capture_output=True, check=True, **clean)
    assert "27 + 58 = 85" in done.stdout
    assert re.search(r"compiled attention \(.*built for x86-64-v[34], without a C\+\+ compiler", done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["editable", "wheel"])
def test_a_package_is_built_without_a_compiler(kind, built, tmp_path):
    """An editable installation does not even look for one."""
    backend = f"from setuptools import build_meta as b; b.build_{kind}({str(tmp_path)!r})"
    command, env = [sys.executable, "-c", backend], os.environ | {"CXX": "", "PATH": ""}
    done = subprocess.run(command, cwd=built / "source", env=env, capture_output=True, text=True, check=True)
    assert ("no compiled kernels: no C++ compiler" in done.stderr) == (kind == "wheel")
    (path,) = tmp_path.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")


@pytest.mark.slow
def test_chat_of_the_wheel_works_in_a_terminal(installed, clean):
    """It has a history, and pasted lines are one message."""
    import pty  # not on Windows

    ours, theirs = pty.openpty()
    command = [installed / "nanoengine", "chat", "demo"]
    chat = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, **clean)
    os.close(theirs)
    shown = b""

    def read_until(pattern):
        nonlocal shown
        while not (found := re.search(pattern, shown)):
            shown += os.read(ours, 1024)
        shown = shown[found.end() :]

    for keys, answer in (
        (b"What is 3 + 4?\r", rb"3 \+ 4 = 7"),
        (b"\033[A\r", rb"3 \+ 4 = 7"),
        (b"\033[200~What is\n40 + 5?\033[201~\r", rb"= \d+"),
        (b"\r", rb"bye"),
    ):
        read_until(rb"> ")
        os.write(ours, keys)
        read_until(answer)
    assert chat.wait(TIMEOUT) == 0
    os.close(ours)


@pytest.mark.slow
def test_source_distribution_is_complete(built):
    """It has all files under version control, and a wheel built from it has the same, but for libraries."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        packed = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
        sdist.extractall(built / "unpacked", filter="data")
    source = {str(path.relative_to(built / "source")) for path in (built / "source").rglob("*")}
    left = {name for name in source - packed if not name.startswith(("build", "nanoengine.egg-info"))}
    assert not left
    assert packed - source == {"PKG-INFO", "setup.cfg"}
    (unpacked,) = (built / "unpacked").iterdir()
    backend = "from setuptools import build_meta as b; b.build_wheel('../..')"
    first = next(built.glob("*.whl"))
    names = {name for name in zipfile.ZipFile(first).namelist() if not name.endswith(".so")}
    first.unlink()
    env = os.environ | {"CXX": "", "PATH": ""}  # the same files are compiled to the same libraries
    subprocess.run([sys.executable, "-c", backend], cwd=unpacked, env=env, check=True, capture_output=True)
    assert set(zipfile.ZipFile(next(built.glob("*.whl"))).namelist()) == names
