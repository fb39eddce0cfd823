"""A child process that uses a copy of the package, from which a file was deleted: `test_deletion.py`.

Nothing of nanoengine is imported when this module is: the child imports the copy.
"""

import contextlib
import io
import sys
from multiprocessing.connection import Connection
from typing import Any

# Imported once, by the process that all children are forked from.
PRELOADED = [
    *("torch", "fastapi.testclient", "uvicorn", "psutil", "tqdm", "safetensors.torch"),
    *("transformers", "transformers.models.auto", "transformers.models.qwen3.configuration_qwen3"),
    *("transformers.models.auto.tokenization_auto", "transformers.generation.configuration_utils"),
]
PROMPTS = ["What is 27 + 58?", "The old queen buried the"]
SETTINGS: dict[str, Any] = {"num_kv_blocks": 20, "max_num_seqs": 4, "pin_threads": False}


def try_copy(connection: Connection, copy: str, use: str, names: dict[str, Any]) -> None:
    """Send the tokens of the bundled model, and what a use of the missing file says."""
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, copy)
    # An editable installation has a finder, which would find what the copy lacks.
    sys.meta_path[:] = [one for one in sys.meta_path if "__editable__" not in str(one)]
    try:
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            connection.send((answer(copy), said(use, names, stderr)))
    except BaseException as error:
        connection.send((None, f"{type(error).__name__}: {error}"))
        raise


def answer(copy: str) -> list[list[int]]:
    import nanoengine

    assert str(nanoengine.__file__).startswith(copy)
    params = nanoengine.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with nanoengine.LLM("demo", **SETTINGS) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def said(use: str, names: dict[str, Any], stderr: io.StringIO) -> str:
    """Return what the user reads: an ImportError, a command's last line, or a server's answer."""
    from nanoengine import LLM, AsyncLLM, SamplingParams
    from nanoengine.__main__ import main

    def post(path: str) -> str:
        from fastapi.testclient import TestClient

        from nanoengine.apps.service import Service, make_app

        with contextlib.closing(AsyncLLM("demo", **SETTINGS)) as engine:
            answer = TestClient(make_app(Service(engine))).post(path, json={"input": "Hello"})
        return str(answer.json()["error"]["message"])

    classes = {"LLM": LLM, "AsyncLLM": AsyncLLM, "SamplingParams": SamplingParams}
    scope = {**classes, "main": main, "post": post, "SETTINGS": SETTINGS, **names}
    try:
        exec(use, scope)
    except ImportError as error:
        return str(error)
    except SystemExit as end:
        return str(end.code) if isinstance(end.code, str) else stderr.getvalue().splitlines()[-1]
    return str(scope.get("message", "nothing"))
