"""Reads the tensors of a checkpoint's safetensors files by name."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanoengine.backends.quantized import Quantized, floats

if TYPE_CHECKING:  # formats.py is imported only for a quantized checkpoint
    from nanoengine.models.formats import Format

# Names of the language model's tensors in a multimodal checkpoint -> names in the language model alone.
PART_NAMES = {
    r"^model\.(language_model|text_model)\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^model\.(?=(embed_tokens|layers|norm)\.)": "model.",  # the published Qwen2-VL
    r"^(language_model\.)?lm_head\.": "lm_head.",
}


class TensorHeader(NamedTuple):
    """Describes a tensor, as the header of its file does."""

    file: Path
    name: str  # in the file
    dtype: str  # safetensors' name: F32, BF16, I64, ...
    shape: tuple[int, ...] | None  # None: known only once the tensor is read


class Reader(Protocol):
    """Reads a checkpoint's tensors by Hugging Face's names: `Files`, or `GGUFFile` of gguf.py."""

    headers: dict[str, TensorHeader]  # by name

    def is_quantized(self, name: str) -> bool:
        """Return whether a weight is quantized."""

    def read(self, name: str, part: tuple[slice, ...] | None = None) -> Tensor | Quantized:
        """Return a tensor, or a part of it. A part of a quantized weight is dequantized."""


class Files:
    """Reads a checkpoint's tensors by name. A quantized weight made of several tensors appears as one.

    Args:
        path: the checkpoint's directory.
        written: the format of the quantized weights; None: the weights are not quantized.
        is_part: read only the language model's tensors of a multimodal checkpoint, by that model's own names.

    Raises:
        ValueError: a file is missing or damaged, two files hold the same tensor, or a part of a quantized
            weight is missing or has the wrong dtype.
    """

    def __init__(self, path: Path, written: "Format | None" = None, is_part: bool = False) -> None:
        self.path, self.written = path, written
        self.headers = _read_headers(path, is_part)
        self._parts: dict[
            str, dict[str, TensorHeader]
        ] = {}  # weight -> its parts, by the ends of their names
        self._opened: tuple[Path, Any] | None = None
        if written is not None:
            self._fold(written)

    def is_quantized(self, name: str) -> bool:
        """Return whether a weight is quantized."""
        return name in self._parts

    def read(self, name: str, part: tuple[slice, ...] | None = None) -> Tensor | Quantized:
        """Return a tensor, or a part of it. A part of a quantized weight is dequantized.

        Raises:
            ValueError: the parts of a quantized weight do not fit each other.
        """
        if name not in self._parts:
            return self._get(self.headers[name], part)
        assert self.written is not None
        try:
            weight = self.written.read({end: self._get(header) for end, header in self._parts[name].items()})
        except (ValueError, KeyError, RuntimeError, IndexError, TypeError) as error:
            raise ValueError(
                f"{self.path}: tensor {name!r}, {self.written.name}, is not sound: {error}"
            ) from error
        if part is None:
            return weight
        return floats(weight, torch.float32)[part]

    def _get(self, header: TensorHeader, part: tuple[slice, ...] | None = None) -> Tensor:
        """Read a tensor from its file. The file stays memory-mapped until another file is read."""
        if self._opened is None or self._opened[0] != header.file:
            with _as_damaged(header.file):
                self._opened = header.file, safe_open(header.file, framework="pt")
        tensors = self._opened[1]
        result: Tensor = (
            tensors.get_tensor(header.name) if part is None else tensors.get_slice(header.name)[part]
        )
        return result

    def _fold(self, written: "Format") -> None:
        """Replace the headers of a quantized weight's parts by one header for the weight."""
        first, headers = written.parts[0], self.headers
        for name in [name for name in headers if name.endswith(f".{first.end}")]:
            if headers[name].dtype in first.dtypes:
                base = name.removesuffix(first.end)
                parts = {part.end: f"{base}{part.end}" for part in written.parts}
                for part in written.parts:
                    header = headers.get(parts[part.end])
                    if header is None and not part.is_optional:
                        raise ValueError(
                            f"{self.path} lacks tensor {parts[part.end]!r}, which {name!r} needs"
                        )
                    if header is not None and header.dtype not in part.dtypes:
                        raise ValueError(
                            f"{header.file} holds tensor {parts[part.end]!r} as {header.dtype}; "
                            f"of {written.name} it is one of {', '.join(part.dtypes)}"
                        )
                found = {end: headers.pop(full) for end, full in parts.items() if full in headers}
                self._parts[f"{base}weight"] = found
        if not self._parts:
            raise ValueError(f"{self.path}: config.json says {written.name}, and no weight is")
        for name in [name for name in headers if name.rpartition(".")[2] in written.unused]:
            del headers[name]
        for name, found in self._parts.items():
            header = found[first.end]
            assert header.shape is not None
            headers[name] = header._replace(dtype="F32", shape=written.shape(header.shape))


@contextmanager
def _as_damaged(file: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or not a safetensors file: {error}") from error


def _read_headers(path: Path, is_part: bool) -> dict[str, TensorHeader]:
    headers: dict[str, TensorHeader] = {}
    for file in _tensor_files(path):
        with _as_damaged(file), safe_open(file, framework="pt") as tensors:
            for saved_name in tensors.keys():  # noqa: SIM118 (not a dict)
                name = saved_name
                if is_part:
                    pattern = next((pattern for pattern in PART_NAMES if re.match(pattern, name)), None)
                    if pattern is None:
                        continue
                    name = re.sub(pattern, PART_NAMES[pattern], name)
                if name in headers:
                    raise ValueError(f"{path} holds tensor {name!r} twice")
                if name.endswith("rotary_emb.inv_freq"):  # a buffer in old Llama checkpoints
                    continue
                part = tensors.get_slice(saved_name)
                headers[name] = TensorHeader(file, saved_name, part.get_dtype(), tuple(part.get_shape()))
    return headers


def _tensor_files(path: Path) -> list[Path]:
    """Return the files that the index names. Without one: model*.safetensors, or else all others."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        files = sorted(path.glob("model*.safetensors")) or sorted(path.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{path} holds no *.safetensors; pickled weights (*.bin, *.pt) are not loaded")
        return files
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map must name the file of each tensor, got {weight_map!r:.40}")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index}: weight_map must name a file beside it for {tensor!r}, got {file!r}")
    files = sorted({path / file for file in weight_map.values()})
    for file in files:
        if not file.is_file():
            raise ValueError(f"{path} lacks the shard {file.name}, which {index.name} names")
    return files


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ValueError: the file does not hold a JSON object.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {content!r:.40}")
    return content


@contextmanager
def as_value_error(path: Path) -> Iterator[None]:
    """Turn transformers' errors about a malformed checkpoint into a ValueError that names the cause."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{path} cannot be loaded: {kind}{error}") from error
