"""From a hub id or a directory to a config, a tokenizer and a loaded model. Safetensors only."""

import itertools
import logging
import re
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import constants, snapshot_download
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from xxhash import xxh3_128

from nanoengine.backends.quantized import PackedEmbedding, Quantized, floats
from nanoengine.config import EngineConfig
from nanoengine.models.decoder import Decoder, DecoderConfig, architecture_of, rope_settings
from nanoengine.models.files import PART_NAMES, Files, TensorHeader, read_json
from nanoengine.models.formats import FORMATS, choose_format
from nanoengine.models.gguf import GGUFFile
from nanoengine.models.gguf_tokenizer import load_byte_level
from nanoengine.models.hf_config import (
    UnsupportedModelError,
    attention_implementation,
    check_config,
    language_part,
    name_causal_lm,
)
from nanoengine.models.lora import Adapter, merge
from nanoengine.models.pooling import Pooling, read_pooling
from nanoengine.models.shard import Shard
from nanoengine.sampling_params import SamplingParams

if TYPE_CHECKING:  # else imported where such a model is loaded
    from nanoengine.models.hf import HFModel

DEMO = Path(__file__).parent.parent / "demo"  # the bundled model, which `demo` names
# Hub ids from before they had an owner.
OWNERS = {name: "openai-community" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "openai-gpt")}
OWNERS["distilgpt2"] = "distilbert"
GENERATION_CONFIG = "generation_config.json"
DEQUANTIZED = ("mxfp4",)  # schemes that transformers dequantises when it loads them
TOKENIZER_FILES = "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"
MAX_TOKEN_LENGTH = 4096  # the time that transformers takes for a GGUF file's token grows with its square
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # by safetensors' names
SERVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POSITIONS = "max_position_embeddings", "max_seq_len", "seq_length"  # what configs call their number
MOST_TOKENS = 1 << 20  # of a model that knows no positions, where max_model_len does not say
MAX_POSITIONS = 2**31 - 1  # the attention kernels' lengths are int32
ROPE = "rope_scaling", "rope_theta"  # what files may say of it
# What configs call the sizes that tensors are made by -> the largest of them, far beyond any model's: PyTorch
# can count in products of three.
SIZES = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 2**24),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"), 2**16),
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED_TO = {EMBEDDING: HEAD, HEAD: EMBEDDING}
CLASSIFIER_HEAD = "score.weight"  # in the place of the head
MATRYOSHKA = "is_matryoshka", "matryoshka_dimensions"  # what files may say of embeddings
# Tensors of heads that guess tokens further ahead (MTP), by their own names or in layers after the model's.
GUESSING = re.compile(r"(model\.)?(mtp\w*|layers\.(?P<layer>\d+))\.")
# Our fused layers -> Hugging Face's, whose outputs lie one after the other.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

# As `Device.pack`: a layer that computes with integers as they are, None where they have to be of the dtype.
Pack = Callable[[Quantized, Tensor | None, torch.dtype], nn.Module | None]


class MisfitError(ValueError):
    """The files hold other tensors than the model is made of."""


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
    # What its config says of weights in few bits that `formats.py` reads; None: there are none.
    quantization: dict[str, Any] | None = None
    pooling: Pooling | None = None  # of what its prompts become instead of text; None: it generates

    def open_files(self) -> Files | GGUFFile:
        """Its tensors, without those of layers that only guess tokens ahead.

        Raises:
            ValueError: a file is missing or damaged.
        """
        if _is_gguf(self.path):
            return GGUFFile(self.path)
        written = None if self.quantization is None else choose_format(self.quantization)
        files = Files(self.path, written, self.is_part)
        if unused := [name for name in files.headers if self.is_guessing(name)]:
            logging.getLogger(__name__).warning(
                "%s: %d tensors of layers beyond the model's are left out, the first is %r",
                *(self.path, len(unused), unused[0]),
            )
            for name in unused:
                del files.headers[name]
        if self.pooling is not None:
            self._without_head(files)
        return files

    def _without_head(self, files: Files) -> None:
        """Leave out the vocabulary's head: a model that pools has none, or a classifier's in its place.

        A body that was saved alone gets the names of one with a head.
        """
        headers, body = files.headers, EMBEDDING.removeprefix("model.")
        if body in headers and files.written is None:
            files.headers = headers = {f"model.{name}": header for name, header in headers.items()}
        if EMBEDDING in headers:
            headers.pop(HEAD, None)
        if self.pooling is not None and self.pooling.labels:
            if CLASSIFIER_HEAD not in headers:
                raise ValueError(f"{self.path} lacks tensor {CLASSIFIER_HEAD!r}, the classifier's head")
            headers[HEAD] = headers.pop(CLASSIFIER_HEAD)

    def is_guessing(self, name: str) -> bool:
        """Whether a tensor is of a layer beyond the model's, which transformers leaves out too."""
        found = GUESSING.match(name)
        return found is not None and (
            found["layer"] is None or int(found["layer"]) >= self.hf_config.num_hidden_layers
        )

    @property
    def written_as(self) -> str | None:
        """In which format its weights are in few bits, for the user; None: in none."""
        if _is_gguf(self.path):
            return "gguf"
        stated = self.quantization or getattr(self.hf_config, "quantization_config", None)
        return None if stated is None else str(stated["quant_method"])

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
    gguf_file: str | None = None,
    model_impl: str = "auto",
    trust_remote_code: bool = False,
    hf_overrides: dict[str, Any] | None = None,
    generation_config: str = "auto",
    runner: str = "auto",
    pooler_config: dict[str, Any] | None = None,
) -> Checkpoint:
    """Find a checkpoint and read everything but its weights.

    `model_impl` "nanoengine" is `decoder.py`, "transformers" is `hf.py`, "auto" the first that can.
    `hf_overrides` are fields of config.json; with `generation_config` "vllm" no sampling parameter is taken
    from the checkpoint. `runner` and `pooler_config` are EngineConfig's.

    Raises:
        ValueError: not a checkpoint, or one that cannot be served; with the reason.
        OSError: a hub id that cannot be found or reached.
    """
    path = _resolve(model, revision, gguf_file)
    gguf = GGUFFile(path) if _is_gguf(path) else None
    hf_config = _read_config(path, trust_remote_code) if gguf is None else _read_gguf_config(gguf)
    if hf_overrides:
        fields = hf_config.to_dict() if gguf is not None else read_json(path / "config.json")
        fields = _overridden(fields, deepcopy(hf_overrides), hf_config)  # transformers fills in what it gets
        with _as_value_error(path):
            hf_config = type(hf_config).from_dict({**fields, "name_or_path": str(path)})
    name_causal_lm(hf_config)
    with _naming(hf_config):
        pooling = read_pooling(path, hf_config, runner, pooler_config)
    whole_config, part = hf_config, language_part(hf_config)
    if part is not None:
        hf_config = part
    with _naming(whole_config):
        quantization, is_quantized = _choose_reader(path, whole_config, model_impl)
        if is_quantized and part is not None:
            raise UnsupportedModelError("its weights are quantised, and it takes more than text")
        if quantization is not None:
            for config in (whole_config, hf_config):  # or transformers would read them by their packages
                config.__dict__.pop("quantization_config", None)
    decoder_config = None
    if model_impl != "transformers" and not is_quantized:
        try:
            with _as_value_error(path):
                decoder_config = DecoderConfig.from_hf(hf_config)
                if pooling is not None:
                    decoder_config = replace(decoder_config, tie_word_embeddings=False)
        except ValueError:
            if model_impl == "nanoengine":
                raise
    if decoder_config is None:
        with _naming(hf_config):
            check_config(hf_config)
    if tokenizer is not None:
        loaded = _load_tokenizer(_resolve(tokenizer, None), trust_remote_code)
    else:
        loaded = _load_tokenizer(path, trust_remote_code) if gguf is None else _load_gguf_tokenizer(gguf)
    if tokenizer is not None and loaded is None:
        raise ValueError(f"tokenizer {tokenizer!r} holds none of {', '.join(TOKENIZER_FILES)}")
    generation_path = path / GENERATION_CONFIG
    generation = read_json(generation_path) if generation_path.is_file() else {}
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
    if generation_config == "vllm":
        generation = {}
    checkpoint = Checkpoint(
        *(path, hf_config, decoder_config, loaded, tuple(known), generation, part is not None),
        *(quantization, pooling),
    )
    checkpoint.default_sampling_params()  # for its errors
    return checkpoint


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def _read_config(path: Path, trust_remote_code: bool) -> Any:
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            base = read_json(path / "adapter_config.json").get("base_model_name_or_path")
            raise ValueError(
                f"{path} holds a LoRA adapter of {base!r}, and no model; load that, with lora={str(path)!r}"
            )
        raise ValueError(f"{path} holds no config.json; a model directory in Hugging Face format is needed")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ValueError(f"{path / 'config.json'} cannot be used: {error}") from error
    _check_fields(path / "config.json", config)
    return config


def _check_fields(path: Path, hf_config: Any) -> None:
    """Raise ValueError where a config's architecture, or a size of it or of its language model, cannot be."""
    for config in (hf_config, hf_config.get_text_config(decoder=True)):
        names = getattr(config, "architectures", None)
        if not isinstance(names, list | None) or not all(isinstance(name, str) for name in names or ()):
            raise ValueError(f"{path}: architectures must be a list of names, got {names!r:.99}")
        for field, most in SIZES.items():
            value = vars(config).get(config.attribute_map.get(field, field))
            sizes = value if isinstance(value, list) else [value]  # one per layer, or one
            for size in sizes if value is not None else ():
                if not isinstance(size, int) or not 0 <= size <= most:
                    raise ValueError(f"{path}: {field} must be an integer in [0, {most}], got {value!r:.99}")


def _overridden(fields: dict[str, Any], overrides: dict[str, Any], config: Any) -> dict[str, Any]:
    """A config.json's fields with others in their place; of a field that is an object, those that are given.

    `config` is what transformers makes of the file: it knows the fields that the file leaves out.

    Raises:
        ValueError: there is no such field.
    """
    fields, overrides = _with_plain_rope(fields), _with_plain_rope(overrides)
    for name, value in overrides.items():
        part = getattr(config, name, None)
        if part is None and name not in (*fields, *ROPE, *MATRYOSHKA) and not hasattr(config, name):
            raise ValueError(f"hf_overrides names {name!r}, which is no field of a {type(config).__name__}")
        if isinstance(value, dict) and isinstance(fields.get(name), dict):
            is_config = isinstance(part, PretrainedConfig)
            value = _overridden(fields[name], value, part) if is_config else {**fields[name], **value}
        fields[name] = value
    return fields


def _with_plain_rope(fields: dict[str, Any]) -> dict[str, Any]:
    """Rope's settings as files had them before transformers 5, which every version reads."""
    rope = fields.get("rope_parameters")
    if not isinstance(rope, dict) or any(isinstance(one, dict) for one in rope.values()):  # by type of layer
        return dict(fields)
    plain = {name: value for name, value in fields.items() if name != "rope_parameters"}
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    theta = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    return plain | theta | {"rope_scaling": scaling}


def _read_gguf_config(file: GGUFFile) -> Any:
    """The config of a GGUF file, whose sizes are checked against the file's tensors."""
    path = file.path
    try:
        if file.is_known:
            config = file.config()
        else:
            file.check_others()
            config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path} cannot be served: {error}") from error
    except Exception as error:
        if file.is_known and isinstance(error, ValueError):
            raise
        raise ValueError(f"{path} ({file.architecture}) cannot be used: {error}") from error
    _check_fields(path, config)
    with torch.device("meta"):
        if file.is_known:
            _check_fit(Decoder(DecoderConfig.from_hf(config)), file.headers, path)
        else:
            with _as_value_error(path):
                model = AutoModelForCausalLM.from_config(config)
            # Two: a tied head may be counted twice here.
            if sum(parameter.numel() for parameter in model.parameters()) > 2 * file.num_weights:
                raise ValueError(f"{path} asks for more weights than the {file.num_weights} that it holds")
    return config


def _load_gguf_tokenizer(file: GGUFFile) -> Any:
    """The tokenizer of a GGUF file. None: it has none."""
    if not file.num_tokens:
        return None
    try:
        if file.fields.get("tokenizer.ggml.model") == "gpt2":
            return load_byte_level(file)
        if any(len(token) > MAX_TOKEN_LENGTH for token in file.strings("tokenizer.ggml.tokens")):
            raise ValueError(f"a token is longer than {MAX_TOKEN_LENGTH} characters")
        return AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name)
    except Exception as error:
        raise ValueError(
            f"the tokenizer in {file.path} cannot be used: {error}; give tokenizer=..."
        ) from error


def _load_tokenizer(path: Path, trust_remote_code: bool) -> Any:
    """The tokenizer of a directory or a GGUF file. None: there is none."""
    if _is_gguf(path):
        return _load_gguf_tokenizer(GGUFFile(path))
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        loaded = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        alone = (path / "tokenizer.model").is_file() and not (path / "tokenizer.json").is_file()
        if alone and find_spec("sentencepiece") is None:
            raise ValueError(
                f"{path} has a tokenizer.model and no tokenizer.json: reading it needs sentencepiece: "
                "pip install 'nanoengine[sentencepiece]'"
            ) from error
        raise ValueError(f"the tokenizer in {path} cannot be used: {error}") from error
    if not loaded.is_fast:
        raise ValueError(f"the tokenizer in {path} has no fast version (tokenizer.json)")
    return loaded


def _choose_reader(path: Path, hf_config: Any, model_impl: str) -> tuple[dict[str, Any] | None, bool]:
    """Who reads weights in few bits: `formats.py`, by what is said of them, or transformers as floats.

    Raises:
        UnsupportedModelError: by a scheme that is not served, or whose library is missing.
    """
    stated = getattr(hf_config, "quantization_config", None)
    for name in ("quantize_config.json", "hf_quant_config.json"):  # GPTQ's and ModelOpt's own
        if not stated and (path / name).is_file():
            content = read_json(path / name)
            stated = content.get("quantization") or {"quant_method": "gptq", **content}
    if not stated:
        return None, False
    scheme = stated.get("quant_method") or stated.get("quant_algo") or "an unnamed scheme"
    try:
        is_ours = choose_format(stated) is not None
    except ValueError as error:
        raise UnsupportedModelError(f"its weights are quantised by {scheme}, and {error}") from None
    if is_ours:
        return stated, False
    if scheme not in DEQUANTIZED:
        raise UnsupportedModelError(
            f"its weights are quantised by {scheme}; served are {', '.join((*FORMATS, *DEQUANTIZED))}, and "
            "checkpoints that are not quantised"
        )
    if model_impl == "nanoengine":
        raise UnsupportedModelError(
            f'its weights are quantised by {scheme}, which only model_impl="transformers" reads'
        )
    hf_config.quantization_config = {**stated, "dequantize": True}
    return None, True


@contextmanager
def _naming(hf_config: Any) -> Iterator[None]:
    """Name the architecture in a refusal."""
    try:
        yield
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{architecture_of(hf_config)} cannot be served: {error}") from error


def _resolve(model: str, revision: str | None, gguf_file: str | None = None) -> Path:
    """The directory of a local model, or of a hub model after downloading what is needed, or a GGUF file."""
    if not model:
        raise ValueError("model must be a directory or a hub id, got ''")
    if model == "demo":
        return DEMO
    path = Path(model).expanduser()
    if path.is_dir():
        if gguf_file is not None and not _is_gguf(path / gguf_file):
            raise ValueError(f"gguf_file must be a .gguf file in {path}, got {gguf_file!r}")
        return path if gguf_file is None else path / gguf_file
    if _is_gguf(path) and gguf_file is None:
        return path
    if path.exists():
        raise ValueError(f"a model must be a directory, a hub id or a .gguf file, got the file {model!r}")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        hint = f"; did you mean {OWNERS[model]}/{model}?" if model in OWNERS else ""
        raise ValueError(f"{model!r} is neither a directory here nor a hub id of the form owner/name{hint}")
    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    wanted = patterns if gguf_file is None else [gguf_file]
    try:
        path = Path(snapshot_download(model, revision=revision, allow_patterns=wanted))
    except OSError as error:
        where = f"was looked for here, in {constants.HF_HUB_CACHE} and at {constants.ENDPOINT}"
        at = "" if revision is None else f" at revision {revision!r}"
        raise OSError(f"{model!r}{at} {where}: {error}") from error
    return path if gguf_file is None else path / gguf_file


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
    pack: Pack = lambda *_: None,
) -> "Decoder | HFModel":
    """Build the model and fill every parameter, from the checkpoint or (dummy) at random.

    With a shard, that part of a decoder: no more is read. Weights in few bits are what `pack` makes of them.

    Raises:
        ValueError: a tensor is missing, unexpected or of the wrong shape, a file is damaged, or the
            model turns out to be one that cannot be served.
    """
    if checkpoint.decoder_config is not None:
        try:
            decoder_config = checkpoint.decoder_config
            return _load_decoder(
                checkpoint, decoder_config, config, dtype, device, max_model_len, shard, pack
            )
        except MisfitError as misfit:
            if config.model_impl not in ("auto", "vllm") or shard is not None:
                raise
            try:  # transformers knows more ways to name the same tensors
                return _load_hf(checkpoint, config, dtype, device, max_model_len, pack)
            except ValueError:
                raise misfit from None
    return _load_hf(checkpoint, config, dtype, device, max_model_len, pack)


def _load_hf(
    checkpoint: Checkpoint,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    pack: Pack,
) -> "HFModel":
    from nanoengine.models.hf import HFModel

    with _naming(checkpoint.hf_config):
        check_config(checkpoint.hf_config)
        causal_lm = _load_transformers(checkpoint, config, dtype, device, pack).to(device)
        model: Any = HFModel(causal_lm, max_model_len)
        if checkpoint.pooling is not None:
            has_labels = bool(checkpoint.pooling.labels)
            model.compute_logits = lambda hidden: causal_lm.score(hidden) if has_labels else hidden
        return model  # type: ignore[no-any-return]


def _load_decoder(
    checkpoint: Checkpoint,
    decoder_config: DecoderConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    shard: Shard | None,
    pack: Pack,
) -> Decoder:
    with torch.device("meta"):
        model = whole = Decoder(decoder_config).to(dtype)
        if checkpoint.pooling is not None:
            model.set_submodule("lm_head", _pooling_head(checkpoint.pooling, decoder_config).to(dtype))
        if shard is not None:
            model = Decoder(shard.config).to(dtype)
    is_dummy = config.load_format == "dummy"
    files = None if is_dummy else checkpoint.open_files()
    adapter = None if config.lora is None else Adapter(Path(config.lora))
    shapes = {} if files is None else _check_fit(whole, files.headers, checkpoint.path)
    is_tied = model.config.tie_word_embeddings
    # Where the files hold a head beside the embedding, it may be another one.
    tied = TIED_TO if is_tied and (files is None or not TIED_TO.keys() <= files.headers.keys()) else {}
    changed = set() if adapter is None else adapter.names(tied)
    set_aside = _set_aside(model, files, changed) if files is not None and shard is None else {}
    model = model.to_empty(device=device).eval().requires_grad_(False)  # which unties
    if tied and (adapter is None or not adapter.unties(tied)):
        model.lm_head.weight = model.embed_tokens.weight
    if files is None:
        _fill_at_random(model, config.seed + (shard.rank if shard is not None else 0))
    else:
        _fill(model, files, shard, shapes)
        _take_up(model, set_aside, files, shapes, pack, dtype)
    if adapter is not None:
        merge(adapter, destinations(model), tied)
    # As in transformers (`PreTrainedModel.tie_weights`): a head of its own is used, whatever the config says.
    is_plain = not {"lm_head", "embed_tokens"} & set_aside.keys()
    if is_tied and is_plain and torch.equal(model.lm_head.weight, model.embed_tokens.weight):
        model.lm_head.weight = model.embed_tokens.weight
    model.build_rope_table(max_model_len)
    return model


def _pooling_head(pooling: Pooling, config: DecoderConfig) -> nn.Module:
    """What a model that pools has for a head: a classifier's, or hidden states stay as they are."""
    if not pooling.labels:
        return nn.Identity()
    return nn.Linear(config.hidden_size, len(pooling.labels), bias=False)


def _fill_at_random(model: Decoder, seed: int) -> None:
    generator = torch.Generator(model.norm.weight.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)


def _check_fit(model: Decoder, headers: dict[str, TensorHeader], path: Path) -> dict[str, tuple[int, ...]]:
    """Refuse files that lack a tensor of the model, hold another one, or one of another shape; its shapes."""
    shapes = {name: tuple(part.shape) for name, part in destinations(model).items()}
    if model.config.tie_word_embeddings and HEAD in headers:
        shapes[HEAD] = shapes[EMBEDDING]
        if EMBEDDING not in headers:
            del shapes[EMBEDDING]
    _refuse(path, missing=shapes.keys() - headers.keys(), unexpected=headers.keys() - shapes.keys())
    _check_dtypes(headers, shapes)
    for name, shape in shapes.items():
        if headers[name].shape not in (shape, None):
            raise ValueError(f"tensor {name!r} has shape {headers[name].shape}, the config asks for {shape}")
    return shapes


def _check_dtypes(headers: dict[str, TensorHeader], parameters: Container[str]) -> None:
    """Refuse integers, booleans, complex numbers and unscaled 8-bit floats where a parameter is filled."""
    for name, header in headers.items():
        if header.dtype not in FLOAT_DTYPES and (name in parameters or name.endswith(".weight")):
            raise ValueError(
                f"{header.file} holds tensor {name!r} as {header.dtype}; "
                f"a weight must be one of {', '.join(FLOAT_DTYPES)}"
            )


def _fill(
    model: Decoder, files: Files | GGUFFile, shard: Shard | None, shapes: dict[str, tuple[int, ...]]
) -> None:
    """Copy tensors, or a shard's part of each, one at a time from memory-mapped files: they are held once."""
    wanted: dict[str, list[Tensor]] = {}
    for name, parameter in destinations(model).items():
        wanted.setdefault(_source(name, files), []).append(parameter)
    for name in files.headers:
        for filled in wanted.get(name, ()):  # none where it was set aside
            if shard is None:
                part = floats(_read(files, name, tuple(filled.shape)), filled.dtype)
            else:
                slices = shard.slices(name, filled.dim())
                part = floats(_read(files, name, shapes[name], slices), filled.dtype)
                filled = filled.zero_()[tuple(slice(length) for length in part.shape)]
            filled.copy_(part)  # all of it, but where the shares were rounded up


def _source(name: str, files: Files | GGUFFile) -> str:
    """Return the tensor that fills a weight: of a tied head and embedding the files may hold only one."""
    return TIED_TO[name] if name in TIED_TO and name not in files.headers else name


def _read(
    files: Files | GGUFFile, name: str, shape: tuple[int, ...], part: tuple[slice, ...] | None = None
) -> Tensor | Quantized:
    """Return a tensor of that shape, which of some formats only the contents tell, or a part of it."""
    if part is not None and files.headers[name].shape is not None:
        return files.read(name, part)
    weight = files.read(name)
    found = tuple((weight.integers if isinstance(weight, Quantized) else weight).shape)
    if found != shape:
        raise ValueError(f"tensor {name!r} has shape {found}, the config asks for {shape}")
    return weight if part is None else floats(weight, torch.float32)[part]


def _set_aside(model: Decoder, files: Files | GGUFFile, changed: set[str]) -> dict[str, list[str]]:
    """Take their weights from the layers whose files have them in few bits: no memory is made for those.

    Those that an adapter changes stay.

    Returns:
        The layers' names, and those of their weights in the files.
    """
    set_aside = {}
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            own_names = saved_names(f"{path}.weight")
            names = [_source(name, files) for name in own_names]
            if all(map(files.is_quantized, names)) and not changed & {*own_names}:
                set_aside[path] = names
    for path in set_aside:
        model.get_submodule(path).register_parameter("weight", None)
    return set_aside


def _take_up(
    model: Decoder,
    set_aside: dict[str, list[str]],
    files: Files | GGUFFile,
    shapes: dict[str, tuple[int, ...]],
    pack: Pack,
    dtype: torch.dtype,
) -> None:
    """Give these layers what `pack` makes of their weights, or else plain ones; tied ones are made once."""
    made: dict[tuple[str, ...], nn.Module | nn.Parameter] = {}
    for path, names in set_aside.items():
        layer: Any = model.get_submodule(path)
        new = made.get(tuple(names))
        if new is None:
            parts = [_read(files, name, shapes[name]) for name in names]
            integers = [part for part in parts if isinstance(part, Quantized)]
            if len(integers) == len(parts):
                new = pack(Quantized.cat(integers), getattr(layer, "bias", None), dtype)
            if new is None:
                weight = torch.cat([floats(part, dtype) for part in parts]).to(model.norm.weight.device)
                new = nn.Parameter(weight, requires_grad=False)
            made[tuple(names)] = new
        if isinstance(new, nn.Parameter):
            layer.weight = new
        else:
            model.set_submodule(path, PackedEmbedding.of(new) if isinstance(layer, nn.Embedding) else new)


def _refuse(path: Path, *, missing: Iterable[str] = (), unexpected: Iterable[str] = ()) -> None:
    """Raise MisfitError where there are tensors too few or too many."""
    if names := sorted(missing):
        raise MisfitError(f"{path} lacks {len(names)} tensors, the first is {names[0]!r}")
    if names := sorted(unexpected):
        raise MisfitError(f"{path} holds tensor {names[0]!r} which the architecture does not have")


def _load_transformers(
    checkpoint: Checkpoint,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    pack: Pack = lambda *_: None,
) -> Any:
    """A transformers causal LM with every parameter filled, from safetensors or (dummy) at random.

    It is filled on the device, a tensor at a time, so that the host never holds the model. Only transformers
    without accelerate fills it on the host.
    """
    path = checkpoint.path
    pooling = checkpoint.pooling
    has_labels = pooling is not None and bool(pooling.labels)
    auto: Any = AutoModelForSequenceClassification if has_labels else AutoModelForCausalLM
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
    files = checkpoint.open_files()  # also for its errors: those of transformers are less clear
    source: str | None
    headers, source = files.headers, str(path)
    if has_labels and checkpoint.written_as is not None:
        raise UnsupportedModelError(
            "its weights are in few bits, and it is a classifier on transformers' code"
        )
    if isinstance(files, GGUFFile) and not files.is_known:
        source, settings["gguf_file"] = str(path.parent), path.name
    elif isinstance(files, GGUFFile) or checkpoint.quantization is not None:
        auto, source = MODEL_FOR_CAUSAL_LM_MAPPING[type(checkpoint.hf_config)], None  # its names are its own
        settings["state_dict"] = {name: floats(files.read(name), dtype) for name in headers}
        settings.pop("key_mapping", None)
    with _as_value_error(path), _without_report():
        causal_lm, report = auto.from_pretrained(
            source,
            config=checkpoint.hf_config,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
            **settings,
        )
    parameters = dict(causal_lm.named_parameters())
    if getattr(checkpoint.hf_config, "quantization_config", None) is None and "gguf_file" not in settings:
        _check_dtypes(headers, parameters)
    for name, parameter in parameters.items():
        if parameter.dtype not in SERVED_DTYPES:
            raise ValueError(f"{path}: {name!r} is still {parameter.dtype} after loading")
    for entry in report["mismatched_keys"]:  # a name, from transformers 5 on with both shapes
        raise ValueError(f"{path} holds a tensor of another shape than the config asks for: {entry}")
    unexpected = [
        name
        for name in report["unexpected_keys"]
        if (name in headers or not checkpoint.is_part) and not checkpoint.is_guessing(name)
    ]
    missing = set(report["missing_keys"])
    if pooling is not None and not has_labels:
        head = causal_lm.get_output_embeddings()
        missing -= {f"{name}.weight" for name, module in causal_lm.named_modules() if module is head}
    _refuse(path, missing=missing, unexpected=unexpected)
    changed = set[str]()
    if config.lora is not None:
        adapter = Adapter(Path(config.lora))
        names = {module: f"{name}.weight" for name, module in causal_lm.named_modules()}
        ends = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
        tied = [names[end] for end in ends if end is not None and end.weight is ends[0].weight]
        if len(tied) == 2 and adapter.unties(tied):
            ends[1].weight = nn.Parameter(ends[1].weight.clone(), requires_grad=False)
            parameters = dict(causal_lm.named_parameters())
        merge(adapter, parameters, tied)
        changed = adapter.names(tied)
    layers = dict(causal_lm.named_modules())
    for name in filter(files.is_quantized, () if "gguf_file" in settings else headers):
        layer_name = name.removesuffix(".weight")
        layer = layers.get(layer_name)
        if (
            type(layer) is nn.Linear
            and name not in changed
            and isinstance(weight := files.read(name), Quantized)
        ):
            causal_lm.set_submodule(layer_name, pack(weight, layer.bias, dtype) or layer)
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


def saved_names(name: str) -> list[str]:
    """What Hugging Face calls a parameter of ours; of a fused one, those whose rows it holds in turn."""
    full_name = name if name.startswith("lm_head") else f"model.{name}"
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            return [full_name.replace(fused, part) for part in parts]
    return [full_name]


def destinations(model: Decoder) -> dict[str, Tensor]:
    """Hugging Face tensor name -> the (part of a) parameter it fills."""
    config = model.config
    heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
    rows = {"qkv_proj": [n * config.head_dim for n in heads], "gate_up_proj": [config.intermediate_size] * 2}
    result: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        fused = name.split(".")[-2]
        parts = torch.split(parameter, rows[fused]) if fused in rows else [parameter]
        result |= zip(saved_names(name), parts, strict=True)
    return result


def digest_weights(model: torch.nn.Module) -> bytes:
    """A hash of all weights, by name, as they are computed with: of their dtype too."""
    digest = xxh3_128()
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()
