"""Reads a checkpoint's safetensors files by name."""

import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanoengine.checkpoints.checks import as_value_error, read_json

if TYPE_CHECKING:  # at run time it is imported for quantized weights
    from nanoengine.backends.quantization import Quantized

# Masks and frequencies that old checkpoints hold. They are no weights, and transformers ignores them too.
OLD_BUFFER = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias|\.attn(\.attention)?\.bias)$")


class TensorHeader(NamedTuple):
    """Describes a tensor, as the header of its file does."""

    file: Path
    name: str  # in the file
    dtype: str  # safetensors' name: F32, BF16, I64, ...
    shape: tuple[int, ...] | None  # None: a quantized weight's, known only once it is read


class Files:
    """Reads a checkpoint's tensors by Hugging Face's names. `QuantizedFiles` and `GGUFFile` are subclasses.

    `rename` returns a tensor's name in the model, or None for a tensor of a part that is not loaded.
    Raises ValueError if a file is missing or damaged, or two files hold the same tensor.
    """

    def __init__(self, path: Path, rename: Callable[[str], str | None] | None = None) -> None:
        self.path = path
        self.headers: dict[str, TensorHeader] = {}
        self._opened: tuple[Path, Any] | None = None
        for file in _tensor_files(path):
            tensors = open_tensors(file)
            for saved_name in tensors.keys():  # noqa: SIM118 (not a dict)
                name = saved_name if rename is None else rename(saved_name)
                if name is None or OLD_BUFFER.search(name):
                    continue
                if name in self.headers:
                    where = f"{self.headers[name].file.name} and {file.name}"
                    raise ValueError(f"{path} holds tensor {name!r} twice, in {where}")
                found = tensors.get_slice(saved_name)
                dtype, shape = found.get_dtype(), tuple(found.get_shape())
                self.headers[name] = TensorHeader(file, saved_name, dtype, shape)

    def is_quantized(self, name: str) -> bool:
        """Return whether a weight is quantized."""
        return False

    def read(self, name: str) -> "Tensor | Quantized":
        """Return a tensor. If it is not quantized, it is a view of the mapped file."""
        return self._get(self.headers[name])

    def _get(self, header: TensorHeader) -> Tensor:
        """Return a tensor of a file. The file stays memory-mapped until another file is read."""
        opened = self._opened  # other threads read too
        if opened is None or opened[0] != header.file:
            opened = self._opened = header.file, open_tensors(header.file)
        return opened[1].get_tensor(header.name)  # type: ignore[no-any-return]


def read_as(files: Files, shapes: Mapping[str, tuple[int, ...]], name: str) -> "Tensor | Quantized":
    """Return a tensor, and check its shape: the header of a quantized weight does not state it."""
    weight = files.read(name)
    found = tuple((weight if isinstance(weight, Tensor) else weight.integers).shape)
    if found != shapes[name]:
        raise ValueError(f"tensor {name!r} has shape {found}, the config requires {shapes[name]}")
    return weight


def open_tensors(file: Path) -> Any:
    """Open a safetensors file. Raises ValueError if it is damaged."""
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or not a safetensors file: {error}") from error


def _tensor_files(path: Path) -> list[Path]:
    """Return the files that the index names. Without one: model.safetensors, or model*, or all others."""
    index, whole = path / "model.safetensors.index.json", path / "model.safetensors"
    if not index.is_file():
        if whole.is_file():  # the others are variants, such as model.fp16.safetensors
            return [whole]
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
    with as_value_error(index):  # a name may be too long for the system
        for file in files:
            if not file.is_file():
                if whole.is_file() and whole not in files:
                    return [whole]
                raise ValueError(f"{path} lacks the shard {file.name}, which {index.name} names")
    return files


FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # safetensors' names


def check_dtypes(headers: dict[str, TensorHeader], parameters: Container[str]) -> None:
    """Raise ValueError if a parameter would be filled with anything but floats of at least 16 bits."""
    for name, header in headers.items():
        if header.dtype not in FLOAT_DTYPES and (name in parameters or name.endswith(".weight")):
            allowed = f"a weight must be one of {', '.join(FLOAT_DTYPES)}"
            raise ValueError(f"{header.file} holds tensor {name!r} as {header.dtype}; {allowed}")
