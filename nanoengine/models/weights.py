"""From a hub id or a directory to a config, a tokenizer and a loaded model. Safetensors only."""

import itertools
import json
import logging
import re
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from xxhash import xxh3_128

from nanoengine.config import EngineConfig
from nanoengine.models.decoder import Decoder, DecoderConfig, architecture_of, rope_settings
from nanoengine.models.hf_config import (
    UnsupportedModelError,
    attention_implementation,
    check_config,
    language_part,
)
from nanoengine.models.shard import Shard
from nanoengine.sampling_params import SamplingParams

if TYPE_CHECKING:  # else imported where such a model is loaded
    from nanoengine.models.hf import HFModel

GENERATION_CONFIG = "generation_config.json"
# Schemes that transformers dequantises when it loads them -> the libraries it needs for that.
DEQUANTIZED: dict[str, tuple[str, ...]] = {"mxfp4": (), "fp8": ("accelerate",)}
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # by safetensors' names
SERVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POSITIONS = "max_position_embeddings", "max_seq_len", "seq_length"  # what configs call their number
MOST_TOKENS = 1 << 20  # of a model that knows no positions, where max_model_len does not say
MAX_POSITIONS = 2**31 - 1  # the attention kernels' lengths are int32
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# What a model that takes images too calls its language model's tensors -> that model's own names.
PART_NAMES = {
    r"^model\.(language_model|text_model)\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^model\.(?=(embed_tokens|layers|norm)\.)": "model.",  # Qwen2-VL's published ones
    r"^(language_model\.)?lm_head\.": "lm_head.",
}
# Hugging Face's name -> our fused parameter and the part of its rows.
FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class MisfitError(ValueError):
    """The files hold other tensors than the model is made of."""


class TensorHeader(NamedTuple):
    """A tensor as the header of its file describes it."""

    file: Path
    name: str  # in the file
    dtype: str  # safetensors' name: F32, BF16, I64, ...
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's files on this machine, and what its config says."""

    path: Path
    hf_config: Any
    # For `decoder.py`; None: it cannot. Whose code serves in the end is the loaded model's `code`.
    decoder_config: DecoderConfig | None
    tokenizer: Any  # a transformers tokenizer, None where there is none
    eos_token_ids: tuple[int, ...]  # every id that ends a sequence
    generation_config: dict[str, Any]
    is_part: bool = False  # the language model of one that takes images too, which are left out

    @property
    def architecture(self) -> str:
        """The class name the checkpoint was saved by."""
        return architecture_of(self.hf_config)

    @property
    def vocab_size(self) -> int:
        """Rows of the logits."""
        return int(self.hf_config.vocab_size)

    @property
    def max_model_len(self) -> int | None:
        """How many positions the model was made for, its rope scaling counted in; None: it does not say."""
        config = self.hf_config
        stated = {name: getattr(config, name, None) for name in POSITIONS}
        field = next((name for name, value in stated.items() if value is not None), None)
        if field is None:
            return None
        positions: Any = stated[field]
        self._check_number(field, positions)
        for rope in rope_settings(config):
            factor = 1.0 if rope.get("factor") is None else rope["factor"]
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", positions
            )
            self._check_number("rope's factor", factor)
            self._check_number("rope's original_max_position_embeddings", original)
            if rope["rope_type"] == "yarn":
                positions = max(positions, int(original * factor))
                self._check_number("rope's factor, times the original_max_position_embeddings,", positions)
            elif rope["rope_type"] in ("dynamic", "longrope"):
                # Beyond, the frequencies depend on the length of what is computed together: every key in
                # the cache would have to be computed again.
                positions = min(positions, original)
        if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
            # Within its first chunk such a layer sees everything; the next begins anew, as no backend does.
            self._check_number("attention_chunk_size", config.attention_chunk_size)
            positions = min(positions, config.attention_chunk_size)
        return int(positions)

    def _check_number(self, field: str, value: Any) -> None:
        if not isinstance(value, int | float) or not 0 < value <= MAX_POSITIONS:
            where = self.path / "config.json"
            raise ValueError(f"{where}: {field} must be above 0 and at most {MAX_POSITIONS}, got {value!r}")

    def default_sampling_params(self) -> SamplingParams:
        """What generation_config.json recommends; vLLM's defaults where it says nothing.

        Raises:
            ValueError: it recommends what cannot be.
        """
        names = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
        names["max_new_tokens"] = "max_tokens"
        given = self.generation_config
        chosen = {ours: given[theirs] for theirs, ours in names.items() if given.get(theirs) is not None}
        try:
            return SamplingParams(**chosen)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.path / GENERATION_CONFIG} cannot be used: {error}") from error

    def choose_length(self, max_model_len: int | None) -> int:
        """The most tokens of a prompt and its output: those asked for, or as many as there are positions.

        Raises:
            ValueError: there are fewer, or the config does not say.
        """
        positions = self.max_model_len or max_model_len
        if positions is None and set(getattr(self.hf_config, "layer_types", None) or ()) == {
            "linear_attention"
        }:
            return MOST_TOKENS  # states alone know no positions
        if positions is None:
            raise ValueError(
                "max_model_len must be given: the checkpoint's config does not say how long it may be"
            )
        length = max_model_len or positions
        if length > positions:
            raise ValueError(
                f"max_model_len must be at most the {positions} positions the model was made for, "
                f"got {length}"
            )
        return length


def open_checkpoint(
    model: str,
    *,
    tokenizer: str | None = None,
    revision: str | None = None,
    model_impl: str = "auto",
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Find a checkpoint and read everything but its weights.

    `model_impl` "nanoengine" is `decoder.py`, "transformers" is `hf.py`, "auto" the first that can.

    Raises:
        ValueError: not a checkpoint, or one that cannot be served; with the reason.
        OSError: a hub id that cannot be found or reached.
    """
    path = _resolve(model, revision)
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} holds no config.json; a model directory in Hugging Face format is needed")
    try:
        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ValueError(f"{path / 'config.json'} cannot be used: {error}") from error
    whole_config, part = hf_config, language_part(hf_config)
    if part is not None:
        hf_config = part
    with _naming(whole_config):
        is_quantized = _choose_dequantizing(path, whole_config, model_impl)
        if is_quantized and part is not None:
            raise UnsupportedModelError("its weights are quantised, and it takes more than text")
    decoder_config = None
    if model_impl != "transformers" and not is_quantized:
        try:
            with _as_value_error(path):
                decoder_config = DecoderConfig.from_hf(hf_config)
        except ValueError:
            if model_impl == "nanoengine":
                raise
    if decoder_config is None:
        with _naming(hf_config):
            check_config(hf_config)
    tokenizer_path = path if tokenizer is None else _resolve(tokenizer, None)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    has_tokenizer = any((tokenizer_path / name).is_file() for name in names)
    if tokenizer is not None and not has_tokenizer:
        raise ValueError(f"tokenizer {tokenizer!r} holds none of {', '.join(names)}")
    loaded = None
    if has_tokenizer:
        loaded = AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=trust_remote_code)
        if not loaded.is_fast:
            raise ValueError(f"the tokenizer in {tokenizer_path} has no fast version (tokenizer.json)")
    generation_path = path / GENERATION_CONFIG
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    eos: list[int] = []
    for name, ids in (
        ("the tokenizer", getattr(loaded, "eos_token_id", None)),
        ("config.json", getattr(hf_config, "eos_token_id", None)),
        ("config.json", getattr(whole_config, "eos_token_id", None)),
        (GENERATION_CONFIG, generation.get("eos_token_id")),
    ):
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(type(token_id) is int for token_id in ids):
            raise ValueError(f"{path}: {name}'s eos_token_id must be a token id or a list of them, got {ids}")
        eos += ids
    known = (token_id for token_id in dict.fromkeys(eos) if 0 <= token_id < hf_config.vocab_size)
    checkpoint = Checkpoint(
        path, hf_config, decoder_config, loaded, tuple(known), generation, part is not None
    )
    checkpoint.default_sampling_params()  # for its errors
    return checkpoint


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: it holds none.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {content!r:.40}")
    return content


def _choose_dequantizing(path: Path, hf_config: Any, model_impl: str) -> bool:
    """Whether the weights are quantised; then transformers is told to dequantise them when it loads them.

    Raises:
        UnsupportedModelError: by a scheme that is not served, or whose library is missing.
    """
    stated = getattr(hf_config, "quantization_config", None)
    for name in ("quantize_config.json", "hf_quant_config.json"):  # GPTQ's and ModelOpt's own
        if not stated and (path / name).is_file():
            content = _read_json(path / name)
            stated = content.get("quantization") or {"quant_method": "gptq", **content}
    if not stated:
        return False
    scheme = stated.get("quant_method") or stated.get("quant_algo") or "an unnamed scheme"
    if scheme not in DEQUANTIZED:
        raise UnsupportedModelError(
            f"its weights are quantised by {scheme}; served are {' and '.join(DEQUANTIZED)}, dequantised "
            "while they are loaded, and checkpoints that are not quantised"
        )
    if model_impl == "nanoengine":
        raise UnsupportedModelError(
            f'its weights are quantised by {scheme}, which only model_impl="transformers" reads'
        )
    for library in DEQUANTIZED[scheme]:
        if find_spec(library) is None:
            raise UnsupportedModelError(
                f"its weights are quantised by {scheme}, which needs {library}: "
                "pip install 'nanoengine[quantized]'"
            )
    hf_config.quantization_config = {**stated, "dequantize": True}
    return True


@contextmanager
def _naming(hf_config: Any) -> Iterator[None]:
    """Name the architecture in a refusal."""
    try:
        yield
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{architecture_of(hf_config)} cannot be served: {error}") from error


def _resolve(model: str, revision: str | None) -> Path:
    """The directory of a local model, or of a hub model after downloading what is needed."""
    if not model:
        raise ValueError("model must be a directory or a hub id, got ''")
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"a model must be a directory or a hub id, got the file {model!r}")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ValueError(f"{model!r} is neither a directory here nor a hub id of the form owner/name")
    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))


def resolve_dtype(dtype: str | torch.dtype, hf_config: Any) -> torch.dtype:
    """A torch dtype from "auto" (the checkpoint's own), "bfloat16", "float16" or "float32"."""
    if dtype == "auto":
        # `dtype` in transformers 5, `torch_dtype` before.
        dtype = getattr(hf_config, "dtype", None) or getattr(hf_config, "torch_dtype", None) or "float32"
    names = {"half": "float16", "float": "float32"}
    resolved = getattr(torch, names.get(dtype, dtype), None) if isinstance(dtype, str) else dtype
    if resolved not in SERVED_DTYPES:
        raise ValueError(f"dtype must be auto, bfloat16, float16 or float32, got {dtype!r}")
    return resolved


@torch.no_grad()
def load_model(
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    shard: Shard | None = None,
) -> "Decoder | HFModel":
    """Build the model and fill every parameter, from the checkpoint or (dummy) at random.

    With a shard, that part of a decoder: no more is read.

    Raises:
        ValueError: a tensor is missing, unexpected or of the wrong shape, a file is damaged, or the
            model turns out to be one that cannot be served.
    """
    if checkpoint.decoder_config is not None:
        try:
            decoder_config = checkpoint.decoder_config
            return _load_decoder(checkpoint, decoder_config, config, dtype, device, max_model_len, shard)
        except MisfitError as misfit:
            if config.model_impl != "auto" or shard is not None:
                raise
            try:  # transformers knows more ways to name the same tensors
                return _load_hf(checkpoint, config, dtype, device, max_model_len)
            except ValueError:
                raise misfit from None
    return _load_hf(checkpoint, config, dtype, device, max_model_len)


def _load_hf(
    checkpoint: Checkpoint,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
) -> "HFModel":
    from nanoengine.models.hf import HFModel

    with _naming(checkpoint.hf_config):
        check_config(checkpoint.hf_config)
        return HFModel(_load_transformers(checkpoint, config, dtype, device).to(device), max_model_len)


def _load_decoder(
    checkpoint: Checkpoint,
    decoder_config: DecoderConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    shard: Shard | None,
) -> Decoder:
    with torch.device("meta"):
        model = whole = Decoder(decoder_config).to(dtype)
        if shard is not None:
            model = Decoder(shard.config).to(dtype)
    is_dummy = config.load_format == "dummy"
    headers = {} if is_dummy else _read_headers(checkpoint)
    if not is_dummy:
        _check_fit(whole, headers, checkpoint.path)
    is_tied = model.config.tie_word_embeddings
    model = model.to_empty(device=device).eval().requires_grad_(False)  # which unties
    # Where the files hold a head beside the embedding, it may be another one.
    if is_tied and not {HEAD, EMBEDDING} <= headers.keys():
        model.lm_head.weight = model.embed_tokens.weight
    if is_dummy:
        _fill_at_random(model, config.seed + (shard.rank if shard is not None else 0))
    else:
        _fill(model, headers, shard)
    # As in transformers (`PreTrainedModel.tie_weights`): a head of its own is used, whatever the config says.
    if is_tied and torch.equal(model.lm_head.weight, model.embed_tokens.weight):
        model.lm_head.weight = model.embed_tokens.weight
    model.build_rope_table(max_model_len)
    return model


def _fill_at_random(model: Decoder, seed: int) -> None:
    generator = torch.Generator(model.norm.weight.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)


def _check_fit(model: Decoder, headers: dict[str, TensorHeader], path: Path) -> None:
    """Refuse files that lack a tensor of the model, hold another one, or one of another shape."""
    shapes = {name: tuple(part.shape) for name, part in _destinations(model).items()}
    if model.config.tie_word_embeddings and HEAD in headers:
        shapes[HEAD] = shapes[EMBEDDING]
        if EMBEDDING not in headers:
            del shapes[EMBEDDING]
    _refuse(path, missing=shapes.keys() - headers.keys(), unexpected=headers.keys() - shapes.keys())
    _check_dtypes(headers, shapes)
    for name, shape in shapes.items():
        if headers[name].shape != shape:
            raise ValueError(f"tensor {name!r} has shape {headers[name].shape}, the config asks for {shape}")


def _check_dtypes(headers: dict[str, TensorHeader], parameters: Container[str]) -> None:
    """Refuse integers, booleans, complex numbers and unscaled 8-bit floats where a parameter is filled."""
    for name, header in headers.items():
        if header.dtype not in FLOAT_DTYPES and (name in parameters or name.endswith(".weight")):
            raise ValueError(
                f"{header.file} holds tensor {name!r} as {header.dtype}; "
                f"a weight must be one of {', '.join(FLOAT_DTYPES)}"
            )


def _fill(model: Decoder, headers: dict[str, TensorHeader], shard: Shard | None) -> None:
    """Copy tensors, or a shard's part of each, one at a time from memory-mapped files: they are held once."""
    wanted = _destinations(model)
    wanted.setdefault(HEAD, wanted[EMBEDDING])
    for file in dict.fromkeys(header.file for header in headers.values()):
        with safe_open(file, framework="pt") as tensors:
            for name, header in headers.items():
                if header.file != file:
                    continue
                if shard is None:
                    wanted[name].copy_(tensors.get_tensor(header.name))
                    continue
                part = tensors.get_slice(header.name)[shard.slices(name, len(header.shape))]
                filled = wanted[name].zero_()[tuple(slice(length) for length in part.shape)]
                filled.copy_(part)  # all of it, but where the shares were rounded up


def _refuse(path: Path, *, missing: Iterable[str] = (), unexpected: Iterable[str] = ()) -> None:
    """Raise MisfitError where there are tensors too few or too many."""
    if names := sorted(missing):
        raise MisfitError(f"{path} lacks {len(names)} tensors, the first is {names[0]!r}")
    if names := sorted(unexpected):
        raise MisfitError(f"{path} holds tensor {names[0]!r} which the architecture does not have")


def _load_transformers(
    checkpoint: Checkpoint, config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> Any:
    """A transformers causal LM with every parameter filled, from safetensors or (dummy) at random.

    It is filled on the device, a tensor at a time, so that the host never holds the model. Only transformers
    without accelerate fills it on the host.
    """
    path = checkpoint.path
    auto: Any = AutoModelForCausalLM
    settings: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": attention_implementation(checkpoint.hf_config),
        "trust_remote_code": config.trust_remote_code,
    }
    if checkpoint.is_part:
        settings["key_mapping"] = PART_NAMES
    if config.load_format == "dummy":
        settings.pop("key_mapping", None)
        devices = [device] if device.type == "cuda" else []
        with _as_value_error(path), torch.random.fork_rng(devices), device:
            torch.manual_seed(config.seed)
            return auto.from_config(checkpoint.hf_config, **settings)
    if device.type != "cpu" and find_spec("accelerate") is not None:  # which transformers asks for
        settings["device_map"] = {"": device}
    headers = _read_headers(checkpoint)  # also for its errors: those of transformers are less clear
    with _as_value_error(path), _without_report():
        causal_lm, report = auto.from_pretrained(
            path,
            config=checkpoint.hf_config,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
            **settings,
        )
    parameters = dict(causal_lm.named_parameters())
    if getattr(checkpoint.hf_config, "quantization_config", None) is None:
        _check_dtypes(headers, parameters)
    for name, parameter in parameters.items():
        if parameter.dtype not in SERVED_DTYPES:
            raise ValueError(f"{path}: {name!r} is still {parameter.dtype} after loading")
    for entry in report["mismatched_keys"]:  # a name, from transformers 5 on with both shapes
        raise ValueError(f"{path} holds a tensor of another shape than the config asks for: {entry}")
    unexpected = [name for name in report["unexpected_keys"] if name in headers or not checkpoint.is_part]
    _refuse(path, missing=report["missing_keys"], unexpected=unexpected)
    return causal_lm


@contextmanager
def _without_report() -> Iterator[None]:
    """No word from transformers on tensors that do not fit: all of it is raised, or left out knowingly."""
    logger = logging.getLogger("transformers.modeling_utils")
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False


@contextmanager
def _as_value_error(path: Path) -> Iterator[None]:
    """Whatever transformers makes of a checkpoint that is not sound, said as what it is."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{path} cannot be loaded: {kind}{error}") from error


def _destinations(model: Decoder) -> dict[str, Tensor]:
    """Hugging Face tensor name -> the (part of a) parameter it fills."""
    config = model.config
    rows = {
        "qkv_proj": [n * config.head_dim for n in (config.num_heads, *[config.num_kv_heads] * 2)],
        "gate_up_proj": [config.intermediate_size] * 2,
    }
    result: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        full_name = name if name.startswith("lm_head") else f"model.{name}"
        fused = next((f for f in rows if f".{f}." in name), None)
        if fused is None:
            result[full_name] = parameter
            continue
        parts = torch.split(parameter, rows[fused])
        for part_name, (target, index) in FUSED.items():
            if target == fused:
                result[full_name.replace(fused, part_name)] = parts[index]
    return result


def _tensor_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint; where there is an index, it decides which belong to it."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index}: weight_map must name the file of each tensor, got {weight_map!r:.40}")
        for tensor, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(
                    f"{index}: weight_map must name a file of that directory for {tensor!r}, got {file!r}"
                )
        files = sorted({path / file for file in weight_map.values()})
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} holds no *.safetensors; pickled weights (*.bin, *.pt) are not loaded")
    for file in files:
        if not file.is_file():
            raise ValueError(f"{path} lacks the shard {file.name}, which {index.name} names")
    return files


def digest_weights(model: torch.nn.Module) -> bytes:
    """A hash of all weights, by name, as they are computed with: of their dtype too."""
    digest = xxh3_128()
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()


def _read_headers(checkpoint: Checkpoint) -> dict[str, TensorHeader]:
    """What a checkpoint's files hold, by tensor name; the tensors themselves are not read.

    Of a model that takes images too, what belongs to its language model, by that model's names.

    Raises:
        ValueError: a file is missing or damaged, or a tensor is in two of them.
    """
    headers: dict[str, TensorHeader] = {}
    for file in _tensor_files(checkpoint.path):
        try:
            with safe_open(file, framework="pt") as tensors:
                for saved_name in tensors.keys():  # noqa: SIM118 (not a dict)
                    name = saved_name
                    if checkpoint.is_part:
                        pattern = next((pattern for pattern in PART_NAMES if re.match(pattern, name)), None)
                        if pattern is None:
                            continue
                        name = re.sub(pattern, PART_NAMES[pattern], name)
                    if name in headers:
                        raise ValueError(f"{checkpoint.path} holds tensor {name!r} twice")
                    if name.endswith("rotary_emb.inv_freq"):  # a buffer old Llamas saved
                        continue
                    part = tensors.get_slice(saved_name)
                    shape = tuple(part.get_shape())
                    headers[name] = TensorHeader(file, saved_name, part.get_dtype(), shape)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or not a safetensors file: {error}") from error
    return headers
