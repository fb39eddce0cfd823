"""Downloads from a local server that plays the hub: which files of a model are fetched."""

import hashlib
import json
import re
import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from nanoengine import LLM
from tests.helpers import DEMO, ask, open_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "owner/name"


class Hub(BaseHTTPRequestHandler):
    """Serves one model from a directory, with the routes that huggingface_hub uses. All others are a 404."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        place = self.path.partition("?")[0]
        root = self.server.root
        files = {str(x.relative_to(root)): x.read_bytes() for x in root.rglob("*") if x.is_file()}
        if match := re.fullmatch(rf"/{MODEL}/resolve/(main|{COMMIT})/(.+)", place):
            name = match[2]
            if name in files:
                if self.command == "GET":
                    self.server.fetched.add(name)
                return self.reply(files[name], ETag=f'"{hashlib.sha1(files[name]).hexdigest()}"')
        elif re.fullmatch(rf"/api/models/{MODEL}(/revision/(main|{COMMIT}))?", place):
            siblings = [{"rfilename": name} for name in files]
            return self.reply({"id": MODEL, "sha": COMMIT, "siblings": siblings})
        elif re.fullmatch(rf"/api/models/{MODEL}/tree/{COMMIT}", place):
            entry = {"type": "file", "oid": COMMIT}
            return self.reply([{**entry, "path": name, "size": len(x)} for name, x in files.items()])
        self.server.unknown.append(self.path)
        return self.reply({"error": "not found"}, status=404)

    def reply(self, content, status=200, **headers):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": len(data), "X-Repo-Commit": COMMIT} | headers).items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Yield a hub whose model is the bundled one, with other files that must not be fetched."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.root, server.fetched, server.unknown = tmp_path / "served", set(), []
    shutil.copytree(DEMO, server.root, ignore=shutil.ignore_patterns("*.py", "__pycache__", "accuracy.json"))
    others = "original/model.safetensors", "original/params.json", "onnx/model.onnx", "pytorch_model.bin"
    for name in (*others, "consolidated.safetensors"):
        (server.root / name).parent.mkdir(exist_ok=True)
        (server.root / name).write_bytes(b"large")
    Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()


TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"}
CONFIGS = {*TOKENIZER, "generation_config.json"}


def split_in_shards(root):
    """Give the weights two files and an index."""
    tensors = load_file(root / "model.safetensors")
    (root / "model.safetensors").unlink()
    weight_map = {}
    for i, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        shard = f"weights-{i}.safetensors"
        save_file({name: tensors[name] for name in names}, root / shard)
        weight_map |= dict.fromkeys(names, shard)
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (root / "model-of-another-format.safetensors").write_bytes(b"large")


def test_only_configs_tokenizer_and_weights_are_fetched(hub):
    with LLM(MODEL, num_kv_blocks=8) as llm:
        (output,) = ask(llm, ["Hello"], max_tokens=2, ignore_eos=True)
    assert len(output.outputs[0].token_ids) == 2
    assert hub.fetched == {*CONFIGS, "model.safetensors"}
    assert not [path for path in hub.unknown if MODEL in path]
    hub.fetched.clear()
    open_checkpoint(MODEL, revision=COMMIT)
    assert not hub.fetched, "they are in the cache"


def test_files_that_the_index_names_are_fetched(hub):
    split_in_shards(hub.root)
    files = open_checkpoint(MODEL).open_files()
    weights = "model.safetensors.index.json", "weights-0.safetensors", "weights-1.safetensors"
    assert hub.fetched == {*CONFIGS, *weights}
    assert files.headers.keys() == open_checkpoint(str(DEMO)).open_files().headers.keys()


def test_weights_with_other_names_are_fetched_if_there_are_no_others(hub):
    (hub.root / "consolidated.safetensors").unlink()
    (hub.root / "model.safetensors").rename(hub.root / "gptq_model-4bit.safetensors")
    open_checkpoint(MODEL).open_files()
    assert hub.fetched == {*CONFIGS, "gptq_model-4bit.safetensors"}


def test_dummy_weights_are_not_downloaded(hub):
    with LLM(MODEL, load_format="dummy", num_kv_blocks=8):
        assert hub.fetched == CONFIGS


def test_only_the_tokenizer_of_another_model_is_fetched(hub):
    split_in_shards(hub.root)
    (hub.root / "additional_chat_templates").mkdir()
    (hub.root / "additional_chat_templates" / "rag.jinja").write_text("rag")
    opened = open_checkpoint(str(DEMO), tokenizer=MODEL)
    assert opened.tokenizer("Hello").input_ids == open_checkpoint(str(DEMO)).tokenizer("Hello").input_ids
    assert hub.fetched == {*TOKENIZER, "additional_chat_templates/rag.jinja"}


def test_only_the_named_gguf_file_is_fetched(hub):
    (hub.root / "model-Q4_0.gguf").write_bytes(b"GGUF")
    (hub.root / "model-Q8_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"model-Q8_0.gguf cannot be loaded: it ends at byte 4"):
        open_checkpoint(MODEL, gguf_file="model-Q8_0.gguf")
    assert hub.fetched == {"model-Q8_0.gguf"}


def test_cached_model_is_found_without_the_hub_and_others_raise_oserror(hub, monkeypatch):
    with pytest.raises(OSError, match=r"'owner/other' was not found"):
        open_checkpoint("owner/other")
    assert hub.unknown
    open_checkpoint(MODEL)
    hub.fetched.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_checkpoint(MODEL).open_files().headers
    with pytest.raises(OSError, match=r"'owner/other' was not found .*, in .*cache and at http://127"):
        open_checkpoint("owner/other")
