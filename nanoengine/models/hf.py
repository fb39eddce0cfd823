"""Runs all other decoder-only models: transformers' model code with nanoengine's paged attention.

transformers lets a library register an attention function (`AttentionInterface`), and passes every attention
layer's queries, keys and values to it. So the model's own class can compute the flat batch as one row of T
tokens with explicit positions, without a cache object and without a mask. The registered function attends to
the same paged KV cache as decoder.py. If a model computes attention in its own code, hf_attention.py
replaces that code. If some of its layers keep a recurrent state, recurrent.py supplies and stores the states.
`_probe` rejects a model if tokens influence each other anywhere else, or if it counts positions itself.
"""

import copy
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from nanoengine.backends.kv_cache import KVCache, KVSpec
from nanoengine.backends.packing import Target
from nanoengine.backends.paged_attention import PagedAttention
from nanoengine.backends.quantization import fill_quantized, floats
from nanoengine.checkpoints.checkpoint import SERVED_DTYPES, Checkpoint
from nanoengine.checkpoints.checks import ADAPTER_CONFIG, UnsupportedModelError, as_value_error, refuse_misfit
from nanoengine.checkpoints.hf_config import (
    ATTENTION_NAME,
    ATTENTION_TYPES,
    PART_NAMES,
    attention_implementation,
    check_config,
)
from nanoengine.checkpoints.safetensors_files import OLD_BUFFER, check_dtypes, read_as
from nanoengine.config import EngineConfig
from nanoengine.models.hf_attention import METHODS, replace_attention
from nanoengine.models.linear_layers import use_linear_layers
from nanoengine.signals import uninterrupted

# The allowed difference between two trial passes, relative to the norm of a token's queries, keys or hidden
# state. Passes of one shape differ at most in the order of sums, by less than 1e-6 in float32. A wrong
# position changes more than half of the norm.
PROBE_TOLERANCE = 0.02
# Our settings of attention -> transformers' names
_NAMES = {"scale": "scaling", "window": "sliding_window", "softcap": "softcap", "sinks": "s_aux"}
# Arguments that models pass to attention and that can be ignored here.
_HARMLESS = frozenset(("dropout", "position_ids", "position_embeddings", "cache_position", "use_cache"))

# Takes q (T, H, D), k (T, K, D), v (T, K, D') and PagedAttention's settings.
Attend = Callable[..., Tensor]


def _attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """Attend with the paged KV cache, as a layer asks: query (1, H, T, D), key and value (1, K, T, D)."""
    if attention_mask is not None:
        raise UnsupportedModelError("it builds its own attention mask, which is not supported")
    # Some models pass is_causal=False for a single token, which needs no mask.
    is_causal = given.pop("is_causal", None) is not False or query.shape[2] == 1
    if not is_causal or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError("its attention is not causal")
    settings = {ours: given.pop(theirs, None) for ours, theirs in _NAMES.items()}
    used = {name for name, x in given.items() if x is not None and x is not False}
    if unknown := sorted(used - _HARMLESS):
        raise UnsupportedModelError(f"its attention uses {', '.join(unknown)}, which is not supported")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if settings["scale"] is None:
        settings["scale"] = q.shape[-1] ** -0.5
    return module.paged.attend(q, k, v, **settings).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention_forward)


def is_mixer(kind: type) -> bool:
    """Return whether a class stores recurrent states in transformers' cache, or is RecurrentGemma's."""
    forward = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    stores_state = {"update_conv_state", "update_recurrent_state", "set_linear_cache"} & {*names}
    return bool(stores_state) or kind.__name__ == "RecurrentGemmaRecurrentBlock"


class _Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the first operation that needs a value from a GPU, or moves a tensor: the host would wait."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.first: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        if func is torch.ops.aten.index.Tensor:  # a mask's sum is the result's length
            reads = any(x is not None and x.dtype == torch.bool for x in args[1])
        out = func(*args, **(kwargs or {}))
        devices = {x.device for x in (out, *args) if isinstance(x, Tensor)}
        if reads or len(devices) > 1:
            self.first = self.first or str(func)
        return out


class _BodyOutput(tuple[Tensor]):
    """Holds a body's output, which heads read by index or name. All but the hidden states is None."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


class _GivenHidden(nn.Module):
    """Stands in for the body of a causal LM to compute only its head. It returns its input."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _BodyOutput:
        """Return the hidden states, (1, R, E), unchanged."""
        return _BodyOutput((inputs_embeds,))

    @property
    def decoder(self) -> "_GivenHidden":
        """The module itself, because OPT's head calls `model.decoder`."""
        return self


class HFModel(nn.Module):
    """Wraps a transformers causal LM in the interface of `decoder.Decoder`."""

    code = "transformers'"
    replaceable = False

    def __init__(self, causal_lm: Any, max_model_len: int | None = None) -> None:
        super().__init__()
        self.causal_lm = causal_lm.eval().requires_grad_(False)
        body = next((n for n in (causal_lm.base_model_prefix, "model") if n in causal_lm._modules), None)
        if body is None:
            raise UnsupportedModelError("its body cannot be separated from its head")
        self.body = causal_lm._modules[body]
        # The head is the whole model with a stand-in body, so that scaling, soft-capping and biases around
        # the head are computed too. It shares every weight with the model.
        self.head = copy.copy(causal_lm)
        self.head._modules = {**causal_lm._modules, body: _GivenHidden()}
        if hasattr(self.body, "lm_head_multiplier"):  # Falcon-H1's head reads it from the body
            self.head._modules[body].lm_head_multiplier = self.body.lm_head_multiplier
        if attention_implementation(causal_lm.config) == "eager":
            replace_attention(causal_lm)
            causal_lm.config._attn_implementation = ATTENTION_NAME  # so that transformers makes no masks
        if any(hasattr(module, "create_position_ids_from_input_ids") for module in causal_lm.modules()):
            logging.getLogger(__name__).warning(
                "%s runs at positions 0, 1, ..., as in transformers' generate, but was trained from "
                "pad_token_id + 1 on: its answers may be poor",
                type(causal_lm).__name__,
            )
        # PyTorch's grouped matrix products of experts need rows of a multiple of 16 bytes.
        weights = (x for x in causal_lm.parameters() if x.dim() == 3)
        if any(x.shape[-1] * x.element_size() % 16 for x in weights):
            getattr(causal_lm, "set_experts_implementation", str)("eager")  # since transformers 5
        # An attribute of every module, because not every body passes keyword arguments on to its attention.
        self._paged = SimpleNamespace(attend=None)  # the attention function of the current pass
        for module in causal_lm.modules():
            module.paged = self._paged
            module._load_state_dict_pre_hooks.clear()  # Mamba2's hook is a reference cycle
        mixers = [module for module in causal_lm.modules() if is_mixer(type(module))]
        self.states = None
        if mixers:
            from nanoengine.models.recurrent import States

            self.states = States(mixers)
        self.kv_specs: list[KVSpec] = []  # what attention stores per token, in call order
        self.attention_settings: frozenset[str] = frozenset()  # used by the layers, other than a scale
        self._probe(max_model_len)

    def forward(
        self, input_ids: Tensor, positions: Tensor, caches: Sequence[KVCache], attention: PagedAttention
    ) -> Tensor:
        """Return the hidden states, (T, E), and write K and V to the caches, as `Decoder.forward` does."""
        in_order = iter(caches)

        def attend(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
            return attention(q, k, v, next(in_order), **settings)

        return self._run(input_ids, positions, attend)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of R tokens: (R, E) -> (R, vocab_size)."""
        logits: Tensor = self.head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
        return logits[0]

    def use_linear_layers(self) -> None:
        """Replace modules that multiply by a weight with linear layers, which a device can pack."""
        use_linear_layers(self.causal_lm)

    def _run(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": input_ids[None], "position_ids": positions[None]}
        if self.causal_lm.config.model_type == "llama4_text":  # it makes its masks if none are given
            masks = {"full_attention": None, "chunked_attention": None}
            # `cache` from transformers 5.24 on
            parameters = inspect.signature(inspect.unwrap(type(self.body).forward)).parameters
            name = "cache" if "cache" in parameters else "past_key_values"
            # Its positions are the length of a cache plus each token's index in the batch. Paged attention
            # reads cached keys and values itself, so `update` returns only the new ones.
            lengths = positions - torch.arange(len(positions), device=positions.device)
            cache = SimpleNamespace(
                get_seq_length=lambda *_, **__: lengths, update=lambda k, v, *_, **__: (k, v)
            )
            inputs |= {name: cache, "attention_mask": masks}
        self._paged.attend = attend
        try:
            hidden: Tensor = self.body(**inputs, use_cache=False)[0]
        finally:
            self._paged.attend = None  # do not keep the caches alive
        return hidden[0]

    @uninterrupted()
    @torch.no_grad()  # inference_mode would hide the parts of composite operations from `_Waits`
    def _probe(self, max_model_len: int | None) -> None:
        """Find out what each layer stores, and reject a model that would be computed wrongly.

        The trial passes replace attention with a function of each token alone. Layers with states treat each
        token as a sequence of its own. If tokens still influence each other, the model mixes them elsewhere
        and would mix the sequences of a flat batch. If a token's index in the batch matters, the model counts
        positions itself. All passes have the same shape, so that they round in the same way.
        """
        config = self.causal_lm.config
        seen: list[Tensor] = []  # of one pass: queries and keys of each layer, (T, ..)

        def record(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
            self.kv_specs.append(KVSpec(k.shape[1], k.shape[2], v.shape[2], k.dtype, settings.get("window")))
            self.attention_settings |= {n for n, x in settings.items() if n != "scale" and x is not None}
            return stand_in(q, k, v)

        def stand_in(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
            seen.extend((q.flatten(1), k.flatten(1)))
            return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

        def trial(ids: Tensor, positions: Tensor, attend: Attend) -> list[Tensor]:
            seen.clear()
            with nullcontext() if self.states is None else self.states.probe():
                hidden = self._run(ids, positions, attend)
            return [*seen, hidden]

        device = self.causal_lm.get_input_embeddings().weight.device
        ids = torch.arange(1, 9, device=device)
        positions = ids + 7  # larger than the number of tokens, as in most steps
        other_ids = torch.cat((ids[1:-1], ids[:1], ids[-1:]))  # every token but the last one differs
        try:
            first = trial(ids, positions, record)
            with _Waits() as waits:
                among_others = trial(other_ids, positions, stand_in)
            backwards = trial(ids.flip(0), positions.flip(0), stand_in)
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(f"a trial pass failed: {type(error).__name__}: {error}") from error
        num_layers, num_calls = config.num_hidden_layers, len(self.kv_specs)
        if num_calls != num_layers and self.states is None:
            raise UnsupportedModelError(
                f"its {num_layers} layers make {num_calls} replaceable calls of attention instead of one each"
            )
        if config.model_type not in METHODS:  # hf_attention.py takes windows from fields of other names
            self._check_windows(max_model_len)
        if _differ([x[-1:] for x in first], [x[-1:] for x in among_others]):
            raise UnsupportedModelError("its tokens interact outside attention")
        if _differ(first, [x.flip(0) for x in backwards]):
            raise UnsupportedModelError("it takes a token's index in the batch for its position")
        self.capturable = waits.first is None  # a CUDA graph cannot capture a wait

    def _check_windows(self, max_model_len: int | None) -> None:
        """Reject a model if a layer's window is not that of its type in the config."""
        config = self.causal_lm.config
        windows = [spec.window for spec in self.kv_specs]
        is_read = "sliding_window" in inspect.signature(type(config)).parameters  # else it means nothing
        configured = config.sliding_window if is_read else None
        layer_types = getattr(config, "layer_types", None) or []
        if self.states is not None:
            layer_types = [kind for kind in layer_types if kind in ATTENTION_TYPES]
        if len(layer_types) != len(windows):
            layer_types = ["sliding" if configured else "full"] * len(windows)
        # Models may leave out a window that covers all positions.
        is_whole = configured and max_model_len is not None and configured >= max_model_len
        for layer_type, window in zip(layer_types, windows, strict=True):
            if layer_type.startswith("sliding") != (window is not None) and not (window is None and is_whole):
                raise UnsupportedModelError(f"a {layer_type} layer attends with window {window}")


def _differ(these: list[Tensor], those: list[Tensor]) -> bool:
    """Return whether two trial passes differ by more than rounding for any token."""
    return any(
        bool(((x - y).float().norm(dim=-1) > PROBE_TOLERANCE * x.float().norm(dim=-1)).any())
        for x, y in zip(these, those, strict=True)
    )


def load_hf(
    checkpoint: Checkpoint, config: EngineConfig, target: Target, max_model_len: int, adapter: Any
) -> HFModel:
    """Load a model with transformers' code, or raise ValueError: unsupported, or its files do not fit."""
    try:
        check_config(checkpoint.hf_config)  # `open_checkpoint` has not if decoder.py was to run it
        causal_lm = _load_transformers(checkpoint, config, target, adapter).to(target.device)
        return HFModel(causal_lm, max_model_len)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{checkpoint.architecture} is not supported: {error}") from error


def _load_transformers(checkpoint: Checkpoint, config: EngineConfig, target: Target, adapter: Any) -> Any:
    """Return a transformers causal LM with its parameters read from files, or random (load_format "dummy").

    The model is filled on the device, one tensor at a time, so that the host never holds all of it. Without
    accelerate, transformers fills it on the host first. The weights of quantized linear layers are zeros at
    first, which take no memory. Then each is read once, and packed for the device or dequantized.
    """
    path, (dtype, device, _) = checkpoint.path, target
    auto: Any = AutoModelForCausalLM
    settings: dict[str, Any] = {
        "config": checkpoint.hf_config,
        "dtype": dtype,
        "attn_implementation": attention_implementation(checkpoint.hf_config),
        "trust_remote_code": config.trust_remote_code,
    }
    if config.load_format == "dummy":
        devices = [device] if device.type == "cuda" else []
        with as_value_error(path), torch.random.fork_rng(devices), device:
            torch.manual_seed(config.seed)
            return auto.from_config(**settings)
    files = checkpoint.open_files()  # its errors are clearer than transformers'
    source: str | None = str(path)
    # from_pretrained would apply an adapter beside the weights, if PEFT is installed, and not merge it.
    kind = type(checkpoint.hf_config)
    has_adapter = kind in MODEL_FOR_CAUSAL_LM_MAPPING and (path / ADAPTER_CONFIG).is_file()
    shapes: dict[str, tuple[int, ...]] = {}  # of the weights of quantized layers
    if getattr(files, "is_known", True) is False:  # a GGUF file of a family that transformers reads
        source, settings["gguf_file"] = str(path.parent), path.name
    elif path.suffix == ".gguf" or checkpoint.quantization is not None or has_adapter:
        auto, source = MODEL_FOR_CAUSAL_LM_MAPPING[kind], None  # headers use its names
        shapes = _find_quantized(auto, checkpoint, files, set() if adapter is None else adapter.names())
        read = ((name, files.read(name)) for name in files.headers if name not in shapes)
        settings["state_dict"] = {name: floats(tensor, dtype) for name, tensor in read}
        settings["state_dict"] |= {name: torch.zeros((), dtype=dtype).expand(n) for name, n in shapes.items()}
    elif checkpoint.is_part:
        settings["key_mapping"] = PART_NAMES
    has_accelerate = find_spec("accelerate") is not None  # transformers requires it to fill a device
    if device.type != "cpu" and not shapes and has_accelerate:
        settings["device_map"] = {"": device}
    logger = logging.getLogger("transformers.modeling_utils")
    flags: Any = dict.fromkeys(("use_safetensors", "output_loading_info", "ignore_mismatched_sizes"), True)
    with as_value_error(path):
        logger.disabled = True  # it would report the tensors for which `_check_loaded` raises errors
        try:
            causal_lm, report = auto.from_pretrained(source, **settings, **flags)
        finally:
            logger.disabled = False
    _check_loaded(causal_lm, report, checkpoint, files.headers, is_converted="gguf_file" in settings)
    quantized = {name.removesuffix(".weight"): [name] for name in shapes}
    fill_quantized(causal_lm, quantized, partial(read_as, files, shapes), target)
    if adapter is not None:
        tied = _untie(causal_lm, adapter)
        adapter.merge(dict(causal_lm.named_parameters()), tied)
    return causal_lm


def _find_quantized(
    kind: Any, checkpoint: Checkpoint, files: Any, changed: set[str]
) -> dict[str, tuple[int, ...]]:
    """Return the quantized weights of linear layers that no adapter changes, with their shapes."""
    with as_value_error(checkpoint.path), torch.device("meta"):
        shell = kind(copy.deepcopy(checkpoint.hf_config))
    embedding, held = shell.get_input_embeddings().weight, files.headers.keys() - changed
    return {
        name: tuple(layer.weight.shape)
        for name, layer in ((f"{path}.weight", layer) for path, layer in shell.named_modules())
        if type(layer) is nn.Linear and layer.weight is not embedding
        if name in held and files.is_quantized(name)
    }


def _check_loaded(
    causal_lm: Any, report: dict[str, Any], checkpoint: Checkpoint, headers: Any, is_converted: bool
) -> None:
    """Raise ValueError if the files' tensors do not fit the model: dtypes, shapes, missing or unexpected."""
    path, parameters = checkpoint.path, dict(causal_lm.named_parameters())
    if getattr(checkpoint.hf_config, "quantization_config", None) is None and not is_converted:
        check_dtypes(headers, parameters)
    for name, parameter in parameters.items():
        if parameter.dtype not in SERVED_DTYPES:
            raise ValueError(f"{path}: {name!r} is still {parameter.dtype} after loading")
    for entry in report["mismatched_keys"]:  # a name; since transformers 5 with both shapes
        raise ValueError(f"{path} holds a tensor of another shape than the config requires: {entry}")
    unexpected = [
        name
        for name in report["unexpected_keys"]
        if (name in headers or not checkpoint.is_part) and not checkpoint.is_draft_tensor(name)
        if not OLD_BUFFER.search(name)
    ]
    refuse_misfit(path, missing=set(report["missing_keys"]), unexpected=unexpected)


def _untie(causal_lm: Any, adapter: Any) -> list[str]:
    """Return the names of the embeddings and the head that is tied to them. Copy the head if need be."""
    names = {module: f"{name}.weight" for name, module in causal_lm.named_modules()}
    ends = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
    tied = [names[end] for end in ends if end is not None and end.weight is ends[0].weight]
    if len(tied) == 2 and adapter.unties(tied):
        ends[1].weight = nn.Parameter(ends[1].weight.clone(), requires_grad=False)
    return tied


def describe_weights(checkpoint: Checkpoint, config: EngineConfig, dtype: torch.dtype) -> str:
    """Say how much memory the weights, or a rank's share, take on a device that computes in this dtype."""
    auto: Any = AutoModelForCausalLM
    with uninterrupted(), torch.device("meta"):
        model = auto.from_config(checkpoint.hf_config, trust_remote_code=config.trust_remote_code)
    num_bytes = sum(x.numel() for x in model.parameters()) * dtype.itemsize / config.tensor_parallel_size
    form = " if dequantized to " if checkpoint.quant_method is not None else " in "
    return f"they take {num_bytes / 2**30:.1f} GiB{form}{str(dtype).removeprefix('torch.')}"
