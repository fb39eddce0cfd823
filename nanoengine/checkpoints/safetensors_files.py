"""Reads a checkpoint's safetensors files by name, and has the checks that every checkpoint needs."""

import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig

from nanoengine.backends.quantization import Quantized
from nanoengine.signals import uninterrupted

ADAPTER_CONFIG = "adapter_config.json"  # beside a LoRA adapter
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

    def read(self, name: str) -> Tensor | Quantized:
        """Return a tensor. If it is not quantized, it is a view of the mapped file."""
        return self._get(self.headers[name])

    def _get(self, header: TensorHeader) -> Tensor:
        """Return a tensor of a file. The file stays memory-mapped until another file is read."""
        opened = self._opened  # other threads read too
        if opened is None or opened[0] != header.file:
            opened = self._opened = header.file, open_tensors(header.file)
        return opened[1].get_tensor(header.name)  # type: ignore[no-any-return]


def read_as(files: Files, shapes: Mapping[str, tuple[int, ...]], name: str) -> Tensor | Quantized:
    """Return a tensor, and check its shape: the header of a quantized weight does not state it."""
    weight = files.read(name)
    found = tuple((weight.integers if isinstance(weight, Quantized) else weight).shape)
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


def read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object in a file, or raise ValueError. If there is no file, any default is returned."""
    if default is not None and not path.is_file():
        return default
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {content!r:.40}")
    return content


def read_config(path: Path, trust_remote_code: bool) -> Any:
    """Return the transformers config of a directory, with the quantization settings of other files."""
    file = path / "config.json"
    if not file.is_file():
        if (path / ADAPTER_CONFIG).is_file():
            base = read_json(path / ADAPTER_CONFIG).get("base_model_name_or_path")
            raise ValueError(
                f"{path} holds a LoRA adapter and no model; load {base!r} with lora={str(path)!r}"
            )
        raise ValueError(f"{path} holds no config.json; a model directory in Hugging Face format is needed")
    with as_value_error(file):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    check_fields(file, config)
    for name in ("quantize_config.json", "hf_quant_config.json"):  # written by GPTQ and ModelOpt
        if not getattr(config, "quantization_config", None) and (path / name).is_file():
            stated = read_json(path / name)
            modelopt = {"quant_method": "modelopt", **(stated.get("quantization") or {})}
            is_gptq = name.startswith("quantize")
            config.quantization_config = {"quant_method": "gptq", **stated} if is_gptq else modelopt
    return config


# Config fields that determine tensor sizes -> their limits, far above any real model's, so that
# PyTorch can count the elements of a tensor in 64 bits.
SIZES = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 2**24),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"), 2**16),
}


def check_fields(path: Path, hf_config: Any) -> None:
    """Raise ValueError if an architecture or a size in a config, or in its text config, is invalid."""
    for config in (hf_config, hf_config.get_text_config(decoder=True)):
        if not hasattr(config, "attribute_map"):
            raise ValueError(f"{path}: the language model's config must be an object, got {config!r:.99}")
        names = getattr(config, "architectures", None)
        if not isinstance(names, list | None) or not all(isinstance(name, str) for name in names or ()):
            raise ValueError(f"{path}: architectures must be a list of names, got {names!r:.99}")
        for field, limit in SIZES.items():
            value = vars(config).get(config.attribute_map.get(field, field))
            sizes = value if isinstance(value, list) else [value]  # one per layer, or one for all
            if value is not None and not all(isinstance(size, int) and 0 <= size <= limit for size in sizes):
                raise ValueError(f"{path}: {field} must be an integer in [0, {limit}], got {value!r:.99}")


FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # safetensors' names


class MisfitError(ValueError):
    """Raised if the files do not hold exactly the tensors of the model."""


def check_dtypes(headers: dict[str, TensorHeader], parameters: Container[str]) -> None:
    """Raise ValueError if a parameter would be filled with anything but floats of at least 16 bits."""
    for name, header in headers.items():
        if header.dtype not in FLOAT_DTYPES and (name in parameters or name.endswith(".weight")):
            allowed = f"a weight must be one of {', '.join(FLOAT_DTYPES)}"
            raise ValueError(f"{header.file} holds tensor {name!r} as {header.dtype}; {allowed}")


def refuse_misfit(path: Path, *, missing: Iterable[str] = (), unexpected: Iterable[str] = ()) -> None:
    """Raise MisfitError if a tensor is missing or unexpected."""
    if names := sorted(missing):
        raise MisfitError(f"{path} lacks {len(names)} tensors, the first is {names[0]!r}")
    if names := sorted(unexpected):
        raise MisfitError(f"{path} holds tensor {names[0]!r} which the architecture does not have")


class UnsupportedModelError(ValueError):
    """Raised if a model cannot be computed over a flat batch with paged attention. The message says why."""


@contextmanager
def as_value_error(source: Path | str) -> Iterator[None]:
    """Turn transformers' errors about a malformed file into a ValueError that names its cause.

    A signal's handler may also raise any exception, so signals wait until the block ends.
    """
    with uninterrupted():
        try:
            yield
        except Exception as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise ValueError(f"{source} cannot be loaded: {kind}{error}") from error
