"""Finds a checkpoint, and reads everything except its weights: config, tokenizer, generation config."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanoengine.checkpoints.checks import UnsupportedModelError, as_value_error, read_config, read_json
from nanoengine.checkpoints.decoder_config import ARCHITECTURES, DecoderConfig, architecture_of, rope_settings
from nanoengine.checkpoints.safetensors_files import Files
from nanoengine.checkpoints.tokenizer import TOKENIZER_FILES, load_tokenizer
from nanoengine.config import EngineConfig
from nanoengine.sampling_params import SamplingParams
from nanoengine.signals import uninterrupted
from nanoengine.timing import phase

if TYPE_CHECKING:  # at run time each is imported only for a checkpoint that needs it
    from nanoengine.checkpoints.download import Wanted
    from nanoengine.checkpoints.gguf import GGUFFile

DEMO = Path(__file__).parent.parent / "demo"  # the bundled model, named "demo"
GENERATION_CONFIG = "generation_config.json"
# Its fields that choose tokens in transformers only, and which value changes nothing. vLLM ignores them too
_NAMES = "bad_words_ids begin_suppress_tokens epsilon_cutoff eta_cutoff exponential_decay_length_penalty "
_NAMES += "force_words_ids forced_bos_token_id forced_eos_token_id min_length min_new_tokens penalty_alpha "
_NAMES += "no_repeat_ngram_size sequence_bias stop_strings suppress_tokens top_h watermarking_config"
NOT_APPLIED: dict[str, Any] = dict.fromkeys(_NAMES.split())
NOT_APPLIED |= dict.fromkeys(["encoder_repetition_penalty", "guidance_scale", "num_beams", "typical_p"], 1)
SERVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ORIGINAL = "original_max_position_embeddings"
POSITIONS = "max_position_embeddings", "max_seq_len", "seq_length"  # as configs call their number
# Ends of the names of classes that generate no text. Other pooling models have a modules.json.
POOLING = "ForSequenceClassification", "ForTokenClassification", "RewardModel"
DEFAULT_LENGTH = 1 << 20  # default max_model_len of a model without positions
MAX_POSITIONS = 2**31 - 1  # the attention kernels' lengths are int32
# Tensors that only draft tokens (MTP). They have names of their own, or are in layers after the model's last.
DRAFT_TENSORS = re.compile(r"(model\.)?(mtp\w*|layers\.(?P<layer>\d+))\.")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Describes a model's files on this machine, and what its config says."""

    path: Path
    hf_config: Any
    decoder_config: DecoderConfig | None  # None: decoder.py does not support the model
    tokenizer: Any  # a transformers tokenizer; None: the checkpoint has none
    eos_token_ids: tuple[int, ...]  # every id that ends a sequence
    generation_config: dict[str, Any]
    is_part: bool = False  # True: load only the language model of a multimodal model
    quantization: dict[str, Any] | None = None  # its settings, if quantized_formats.py reads the weights
    gguf: "GGUFFile | None" = None  # the open file: its header is parsed once

    def open_files(self) -> Files:
        """Return a reader of the tensors, without those that only draft tokens."""
        if self.gguf is not None:
            return self.gguf if self.gguf.is_current() else type(self.gguf)(self.path)
        rename: Callable[[str], str | None] | None = None
        if self.is_part:
            from nanoengine.checkpoints.hf_config import name_in_part

            rename = name_in_part
        if self.quantization is None:
            files = Files(self.path, rename)
        else:
            from nanoengine.checkpoints.quantized_formats import QuantizedFiles

            files = QuantizedFiles(self.path, rename, self.quantization)
        if unused := [name for name in files.headers if self.is_draft_tensor(name)]:
            logging.getLogger(__name__).warning(
                "%s: ignoring %d tensors of layers that the config does not have, the first is %r",
                *(self.path, len(unused), unused[0]),
            )
            for name in unused:
                del files.headers[name]
        return files

    def is_draft_tensor(self, name: str) -> bool:
        """Return whether a tensor only serves to draft tokens. transformers ignores these tensors too."""
        found = DRAFT_TENSORS.match(name)
        return found is not None and (
            found["layer"] is None or int(found["layer"]) >= self.hf_config.num_hidden_layers
        )

    @property
    def quant_method(self) -> str | None:
        """The format of the quantized weights; None: the weights are not quantized."""
        if self.gguf is not None:
            return "gguf"
        stated = self.quantization or getattr(self.hf_config, "quantization_config", None)
        return str(stated["quant_method"]) if stated else None

    @property
    def architecture(self) -> str:
        """The name of the class that the checkpoint was saved from."""
        return architecture_of(self.hf_config)

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the vocabulary, which is the number of logits per token."""
        return int(self.hf_config.vocab_size)

    @property
    def max_model_len(self) -> int | None:
        """The number of positions the model supports, including rope scaling; None: the config has none."""
        config = self.hf_config
        field = next((name for name in POSITIONS if getattr(config, name, None) is not None), None)
        if field is None:
            return None
        positions: Any = getattr(config, field)
        self._check_number(field, positions)
        for rope in rope_settings(config):
            factor = 1.0 if rope.get("factor") is None else rope["factor"]
            original = rope.get(ORIGINAL) or getattr(config, ORIGINAL, positions)
            self._check_number("rope's factor", factor)
            self._check_number(f"rope's {ORIGINAL}", original)
            if rope["rope_type"] == "yarn":
                positions = max(positions, int(original * factor))
                self._check_number(f"rope's factor, times the {ORIGINAL},", positions)
            elif rope["rope_type"] == "linear" and not config.model_type.startswith("gemma3"):
                positions = int(positions * factor)  # Gemma 3's number already includes the factor
                self._check_number("rope's factor, times the positions,", positions)
            elif rope["rope_type"] in ("dynamic", "longrope"):
                # Past the original length, every key in the cache would have to be computed again.
                positions = min(positions, original)
        if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
            # Later chunks do not see earlier ones, which no backend supports.
            self._check_number("attention_chunk_size", config.attention_chunk_size)
            positions = min(positions, config.attention_chunk_size)
        return int(positions)

    def _check_number(self, field: str, value: Any) -> None:
        if not isinstance(value, int | float) or not 0 < value <= MAX_POSITIONS:
            where = self.path / "config.json"
            raise ValueError(f"{where}: {field} must be above 0 and at most {MAX_POSITIONS}, got {value!r}")

    def default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of generation_config.json, and vLLM's defaults for all others."""
        names = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
        names["max_new_tokens"] = "max_tokens"
        chosen = {names[x]: v for x, v in self.generation_config.items() if x in names and v is not None}
        try:
            return SamplingParams(**chosen)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.path / GENERATION_CONFIG} cannot be used: {error}") from error

    def choose_length(self, max_model_len: int | None) -> int:
        """Return the limit on prompt plus output: max_model_len, or else the number of positions."""
        positions = self.max_model_len or max_model_len
        if positions is None:
            if set(getattr(self.hf_config, "layer_types", None) or ()) == {"linear_attention"}:
                return DEFAULT_LENGTH  # a recurrent state has no positions
            raise ValueError("max_model_len must be given: the model's config does not state a limit")
        if (length := max_model_len or positions) > positions:
            raise ValueError(f"max_model_len must be at most {positions}, the model's limit, got {length}")
        return length


def open_checkpoint(config: EngineConfig) -> Checkpoint:
    """Find the config's model and tokenizer, and read everything except the weights.

    Raises:
        ValueError: the model is not a checkpoint, or the checkpoint is not supported. The message says why.
        OSError: a hub id cannot be found, or the hub cannot be reached.
    """
    overrides = config.hf_overrides or {}
    wanted: Wanted = "configs" if config.load_format == "dummy" else "all"
    path = _resolve(str(config.model), wanted, config.revision, config.gguf_file)
    generation = read_json(path / GENERATION_CONFIG, default={})
    gguf = None
    with phase("header"):
        if path.is_file():
            from nanoengine.checkpoints.gguf import GGUFFile

            gguf = GGUFFile(path)
    with phase("config"):
        whole = read_config(path, config.trust_remote_code) if gguf is None else gguf.read_config()
    fields = read_json(path / "config.json", default={})
    ends = fields if gguf is None else {"eos_token_id": gguf.end_ids()}
    stated_eos = _stated_eos(whole, ends, overrides)
    part = None  # the language model's config, if the model is multimodal
    is_text_only = whole.get_text_config(decoder=True) is whole
    is_known = ARCHITECTURES.get(whole.model_type) == architecture_of(whole)
    if overrides or not is_known or not is_text_only:
        from nanoengine.checkpoints.hf_config import adapt

        whole, part = adapt(whole, fields, overrides)
    quantization, decoder_config = _choose_code(path, whole, part, config.model_impl)
    if config.tokenizer is not None:
        home = _resolve(str(config.tokenizer), "tokenizer")
        tokenizer = load_tokenizer(home, config.trust_remote_code)
        if tokenizer is None:
            files = ", ".join(TOKENIZER_FILES)
            raise ValueError(f"tokenizer {str(config.tokenizer)!r} holds none of {files}")
    else:
        with phase("tokenizer"):
            tokenizer = load_tokenizer(path, config.trust_remote_code, gguf)
    hf_config, eos = whole if part is None else part, list[int]()
    places = ["the tokenizer", *["config.json"] * len(stated_eos), GENERATION_CONFIG]
    found = [getattr(tokenizer, "eos_token_id", None), *stated_eos, generation.get("eos_token_id")]
    for name, ids in zip(places, found, strict=True):
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(type(token_id) is int for token_id in ids):
            raise ValueError(f"{path}: {name}'s eos_token_id must be a token id or a list of them, got {ids}")
        eos += ids
    known = tuple(token_id for token_id in dict.fromkeys(eos) if 0 <= token_id < hf_config.vocab_size)
    given = {} if config.generation_config == "vllm" else generation
    if unused := ", ".join(x for x, same in NOT_APPLIED.items() if given.get(x) and given[x] != same):
        message = "%s: these settings are not applied, as in vLLM: %s"
        logging.getLogger(__name__).warning(message, path / GENERATION_CONFIG, unused)
    checkpoint = Checkpoint(
        path, hf_config, decoder_config, tokenizer, known, given, part is not None, quantization, gguf
    )
    checkpoint.default_sampling_params()  # raise its errors now
    return checkpoint


def _choose_code(
    path: Path, config: Any, part: Any, model_impl: str
) -> tuple[dict[str, Any] | None, DecoderConfig | None]:
    """Return the settings of quantized weights, and the config for decoder.py if that supports the model."""
    architecture, hf_config = architecture_of(config), config if part is None else part
    quantization = decoder_config = None
    try:
        if architecture.endswith(POOLING) or (path / "modules.json").is_file():
            what = "it embeds, scores or classifies texts"
            raise UnsupportedModelError(f"{what}; nanoengine only generates text")
        stated = next(filter(None, (getattr(x, "quantization_config", None) for x in (config, part))), None)
        if stated:
            from nanoengine.checkpoints.quantized_formats import choose_reader

            quantization = choose_reader(stated, config, part, model_impl)
        if model_impl != "transformers" and (quantization is not None or not stated):
            with uninterrupted():  # the exception of a signal's handler may be a ValueError
                try:
                    with as_value_error(path):
                        decoder_config = DecoderConfig.from_hf(hf_config)
                except ValueError:
                    if model_impl == "nanoengine":
                        raise
        if decoder_config is None:
            from nanoengine.checkpoints.hf_config import check_config

            check_config(hf_config)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{architecture} is not supported: {error}") from error
    return quantization, decoder_config


def _stated_eos(config: Any, fields: dict[str, Any], overrides: dict[str, Any]) -> list[Any]:
    """Return each eos_token_id that config.json or hf_overrides states, the language model's first.

    If neither states one, `config` has the default of its class, such as 2 for Llama and 11 for Falcon.
    """
    stated, text_config = [], config.get_text_config(decoder=True)
    for name, part in vars(config).items():
        if hasattr(part, "get_text_config") and part.get_text_config(decoder=True) is text_config:
            inner = [one[name] if isinstance(one.get(name), dict) else {} for one in (fields, overrides)]
            stated += _stated_eos(part, *inner)
    return [*stated, (fields | overrides).get("eos_token_id")]


def _resolve(model: str, wanted: "Wanted", revision: str | None = None, gguf_file: str | None = None) -> Path:
    """Return the path of a model directory or GGUF file. A hub model is downloaded first."""
    if not model:
        raise ValueError("model must be a directory or a hub id, got ''")
    if model == "demo":
        return DEMO
    path = Path(model).expanduser()
    if path.is_dir():
        file = path if gguf_file is None else path / gguf_file
        if gguf_file is not None and not _is_gguf(file):
            raise ValueError(f"gguf_file must be a .gguf file in {path}, got {gguf_file!r}")
        return file
    if _is_gguf(path) and gguf_file is None:
        return path
    if path.exists():
        raise ValueError(f"a model must be a directory, a hub id or a .gguf file, got the file {model!r}")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ValueError(f"{model!r} is neither a directory nor a hub id such as openai-community/gpt2")
    from nanoengine.checkpoints.download import fetch  # only hub models need it

    return fetch(model, revision, gguf_file, wanted)


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def resolve_dtype(dtype: str | torch.dtype, hf_config: Any) -> torch.dtype:
    """Return the torch dtype for "auto" (the checkpoint's own) or a dtype's name, such as "bfloat16"."""
    if dtype == "auto":
        dtype = getattr(hf_config, "dtype", None) or "float32"
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if resolved not in SERVED_DTYPES:
        raise ValueError(f"dtype must be auto, bfloat16, float16 or float32, got {dtype!r}")
    return resolved
