"""Downloads the files that nanoengine reads from the hub, and no others."""

import glob
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import constants, snapshot_download

from nanoengine.checkpoints.checks import read_json

INDEX = "model.safetensors.index.json"
TEMPLATES = ["*.jinja", "additional_chat_templates/*.jinja"]
CONFIGS = ["*.json", "*.model", "*.txt", *TEMPLATES]
TOKENIZERS = [
    *("tokenizer*", "*.model", "vocab*", "merges.txt", "chat_template*", "config.json"),
    *("added_tokens.json", "special_tokens_map.json", *TEMPLATES),
]
# A pattern's * also matches slashes. These match all folders except additional_chat_templates.
OTHER_FOLDERS = ["[!a]*/*", "a[!d]*/*"]


Wanted = Literal["all", "configs", "tokenizer"]


def fetch(model: str, revision: str | None, gguf_file: str | None, wanted: Wanted) -> Path:
    """Download a hub model or parts of it, or one GGUF file. Return the path, or raise OSError.

    The weights are the files of the index. Without an index they are model*.safetensors, or else all
    safetensors files next to config.json.
    """

    def get(patterns: list[str], ignored: list[str] | None, revision: str | None = revision) -> Path:
        chosen: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": ignored}
        return Path(snapshot_download(model, revision=revision, **chosen))

    try:
        if gguf_file is not None:
            return get([glob.escape(gguf_file)], None) / gguf_file
        path = get(TOKENIZERS if wanted == "tokenizer" else CONFIGS, OTHER_FOLDERS)
        if wanted == "all" and (path / "config.json").is_file():
            weights = ["model*.safetensors"]
            if (path / INDEX).is_file():
                shards = read_json(path / INDEX).get("weight_map")
                names = {*shards.values()} if isinstance(shards, dict) else set()
                weights = [glob.escape(name) for name in names]
            get(weights, ["*/*"], path.name)  # a snapshot's name is its commit
            if not any(path.glob("*.safetensors")):
                get(["*.safetensors"], ["*/*"], path.name)
        return path
    except TimeoutError:  # raised by the handler of a signal
        raise
    except OSError as error:
        at = "" if revision is None else f" at revision {revision!r}"
        places = f"as a directory, in {constants.HF_HUB_CACHE} and at {constants.ENDPOINT}"
        raise OSError(f"{model!r}{at} was not found {places}: {error}") from error
