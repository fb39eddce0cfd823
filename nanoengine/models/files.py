"""Reads a checkpoint's safetensors files by name, and has the checks that every checkpoint needs."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanoengine.backends.quantized import Quantized

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
    shape: tuple[int, ...] | None  # None: a quantized weight's, known only once it is read


class Reader(Protocol):
    """Reads a checkpoint's tensors by Hugging Face's names: `Files`, or `GGUFFile` of gguf.py."""

    headers: dict[str, TensorHeader]  # by name

    def is_quantized(self, name: str) -> bool:
        """Return whether a weight is quantized."""

    def read(self, name: str) -> Tensor | Quantized:
        """Return a tensor."""


class Files:
    """Reads a checkpoint's tensors by name. A quantized weight made of several tensors appears as one.

    Args:
        path: the checkpoint's directory.
        weight_format: the format of the quantized weights; None: the weights are not quantized.
        is_part: read only the language model's tensors of a multimodal checkpoint, by that model's own names.

    Raises:
        ValueError: a file is missing or damaged, two files hold the same tensor, or a part of a quantized
            weight is missing or has the wrong dtype.
    """

    def __init__(self, path: Path, weight_format: "Format | None" = None, is_part: bool = False) -> None:
        self.path, self.weight_format = path, weight_format
        self.headers = _read_headers(path, is_part)
        self._parts: dict[
            str, dict[str, TensorHeader]
        ] = {}  # weight -> its parts, by the ends of their names
        self._opened: tuple[Path, Any] | None = None
        if weight_format is not None:
            self._combine_parts(weight_format)

    def is_quantized(self, name: str) -> bool:
        """Return whether a weight is quantized."""
        return name in self._parts

    def read(self, name: str) -> Tensor | Quantized:
        """Return a tensor. If it is not quantized, it is a view of the mapped file."""
        if name not in self._parts:
            return self._get(self.headers[name])
        assert self.weight_format is not None
        try:
            return self.weight_format.read({end: self._get(part) for end, part in self._parts[name].items()})
        except (ValueError, KeyError, RuntimeError, IndexError, TypeError) as error:
            found = f"tensor {name!r}, {self.weight_format.name},"
            raise ValueError(f"{self.path}: {found} is invalid: {error}") from error

    def _get(self, header: TensorHeader) -> Tensor:
        """Return a tensor of a file. The file stays memory-mapped until another file is read."""
        if self._opened is None or self._opened[0] != header.file:
            self._opened = header.file, open_tensors(header.file)
        result: Tensor = self._opened[1].get_tensor(header.name)
        return result

    def _combine_parts(self, weight_format: "Format") -> None:
        """Replace the headers of a quantized weight's parts by one header for the weight."""
        first, headers = weight_format.parts[0], self.headers
        for name, header in list(headers.items()):
            if not name.endswith(f".{first.end}") or header.dtype not in first.dtypes:
                continue
            base, parts = name.removesuffix(first.end), {}
            for part in weight_format.parts:
                if (found := headers.pop(base + part.end, None)) is not None:
                    if found.dtype not in part.dtypes:
                        raise ValueError(
                            f"{found.file} holds tensor {base + part.end!r} as {found.dtype}; "
                            f"in {weight_format.name} it must be one of {', '.join(part.dtypes)}"
                        )
                    parts[part.end] = found
                elif not part.is_optional:
                    raise ValueError(f"{self.path} lacks tensor {base + part.end!r}, which {name!r} needs")
            self._parts[f"{base}weight"] = parts
            headers[f"{base}weight"] = header._replace(dtype="F32", shape=None)
        if not self._parts:
            raise ValueError(
                f"{self.path}: config.json says {weight_format.name}, but no weight has this format"
            )
        for name in [name for name in headers if name.rpartition(".")[2] in weight_format.unused]:
            del headers[name]


def open_tensors(file: Path) -> Any:
    """Open a safetensors file. Raises ValueError if it is damaged."""
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or not a safetensors file: {error}") from error


def _read_headers(path: Path, is_part: bool) -> dict[str, TensorHeader]:
    headers: dict[str, TensorHeader] = {}
    for file in _tensor_files(path):
        tensors = open_tensors(file)
        for saved_name in tensors.keys():  # noqa: SIM118 (not a dict)
            name = _name_in_part(saved_name) if is_part else saved_name
            if name is None or name.endswith("rotary_emb.inv_freq"):  # a buffer in old Llama checkpoints
                continue
            if name in headers:
                raise ValueError(f"{path} holds tensor {name!r} twice")
            tensor = tensors.get_slice(saved_name)
            headers[name] = TensorHeader(file, saved_name, tensor.get_dtype(), tuple(tensor.get_shape()))
    return headers


def _name_in_part(name: str) -> str | None:
    """Return a tensor's name in the language model alone; None: it belongs to another part."""
    for pattern, prefix in PART_NAMES.items():
        if re.match(pattern, name):
            return re.sub(pattern, prefix, name)
    return None


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


# Config fields that determine tensor sizes -> their limits, far above any real model's, so that
# PyTorch can count the elements of a tensor in 64 bits.
SIZES = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 2**24),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"), 2**16),
}


def check_fields(path: Path, hf_config: Any) -> None:
    """Raise ValueError if an architecture or a size in a config, or in its text config, is invalid."""
    for config in (hf_config, hf_config.get_text_config(decoder=True)):
        names = getattr(config, "architectures", None)
        if not isinstance(names, list | None) or not all(isinstance(name, str) for name in names or ()):
            raise ValueError(f"{path}: architectures must be a list of names, got {names!r:.99}")
        for field, limit in SIZES.items():
            value = vars(config).get(config.attribute_map.get(field, field))
            sizes = value if isinstance(value, list) else [value]  # one per layer, or one for all
            if value is not None and not all(isinstance(size, int) and 0 <= size <= limit for size in sizes):
                raise ValueError(f"{path}: {field} must be an integer in [0, {limit}], got {value!r:.99}")


class UnsupportedModelError(ValueError):
    """Raised if a model cannot be computed over a flat batch with paged attention. The message says why."""


@contextmanager
def as_value_error(path: Path) -> Iterator[None]:
    """Turn transformers' errors about a malformed checkpoint into a ValueError that names the cause."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{path} cannot be loaded: {kind}{error}") from error
