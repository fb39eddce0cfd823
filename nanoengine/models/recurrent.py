"""Runs layers that pass a state from token to token: convolutions, state-space models, linear attention.

Such a layer is called a mixer here. transformers' mixers read and store their states through a few methods of
transformers' cache. `States` gives them a stand-in for that cache, and keeps the states in memory with
numbered slots, which extensions/recurrent_states.py assigns to sequences.

A mixer takes sequences of one length. So `States.mix` calls it once for all sequences that decode one token,
(N, 1, E), then once for every other span of a sequence, (1, T, E). A span ends where a state is kept, and at
the end of the prompt, because some Mamba2 models limit only the time steps of a prompt.

Shape letters: T tokens of a step or span, N sequences of one call, E hidden size.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from nanoengine.backends.host_memory import zeros_on_large_pages
from nanoengine.backends.step_inputs import NUM_RESERVED_SLOTS, ZERO_SLOT, StateLayout

NO_LIMITS = 0.0, math.inf  # minimum and maximum of Mamba2's time steps
# The mixers' argument that takes transformers' cache: its name from transformers 5.24 on, and before.
CACHE_NAMES = "cache", "cache_params", "past_key_values"
Key = tuple[str, int]  # "conv" or "recurrent", and the mixer's index for the state
Memory = dict[Key, Any]  # a mixer's states, each a tensor (slots, ...); in a call also tensors or `InPlace`


class StateSpec(NamedTuple):
    """Describes one state that a mixer keeps per sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_kernel: bool  # a CPU kernel can compute decode steps on it in place


class _Call:
    """Stands in for transformers' cache in one call of a mixer, with a row of state per sequence, or none."""

    def __init__(self, past: Memory) -> None:
        self.states = past

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of a convolution, (N, ..., width). A mixer may write to them."""
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a recurrent state, (N, ...). A mixer may write to it."""
        return self.states.get(("recurrent", state_idx))

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return bool(self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False  # it keeps no more inputs than a convolution's width

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: Any = None, **_: Any
    ) -> Tensor:
        """Store the last inputs, given new ones (N, ..., T). Returns the previous inputs and the new ones."""
        key = "conv", state_idx
        before = self.states.get(key)
        width = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        if before is not None:
            conv_states = torch.cat((before, conv_states), -1)
        elif conv_states.shape[-1] < width:
            conv_states = nn.functional.pad(conv_states, (width - conv_states.shape[-1], 0))
        self.states[key] = conv_states[..., -width:]
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Store a new recurrent state, and return it."""
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states

    get_linear_cache = get_recurrent_state  # MiniMax's name

    def set_linear_cache(self, layer_idx: int, states: Tensor) -> None:
        self.update_recurrent_state(states, layer_idx)


class InPlace:
    """Refers to the states of several sequences in memory, for a kernel that updates them in place."""

    def __init__(self, memory: Tensor, sources: Tensor, targets: Tensor) -> None:
        self.memory, self.slots = memory, (sources, targets)

    def to(self, dtype: torch.dtype) -> "InPlace":
        """Return self: transformers' code converts states, but a kernel takes the dtype in memory."""
        return self


class States:
    """Owns the states of a model's mixers, whose `forward` it replaces by one that calls `mix`."""

    def __init__(self, mixers: list[nn.Module]) -> None:
        self.specs: list[dict[Key, StateSpec]] = []  # one per mixer, in call order; set by `probe`
        self.memory: list[Memory] = []  # one per mixer, made by `allocate`
        self.kernels: Any = None  # the CPU backend's; None: compute with transformers' code
        # Neither self nor the stand-in functions may refer to a mixer: a reference cycle would keep the
        # weights in memory until the garbage collector runs.
        for mixer in mixers:
            _take_over(mixer, self)
        self._step: StateLayout[Tensor] | None = None
        self._probed: list[dict[Key, StateSpec]] | None = None
        self._memories: Iterator[tuple[Memory, dict[Key, StateSpec]]] = iter(())  # of the remaining mixers
        # State of the current call, for the stand-in functions:
        self.initial: Iterator[Any] = iter(())  # the recurrent state, or one per head; empty: zeros
        self.time_limits = NO_LIMITS

    @property
    def slot_bytes(self) -> int:
        """The size of all states of one sequence."""
        all_specs = (spec for specs in self.specs for spec in specs.values())
        return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in all_specs)

    def count_slots(self, limit: int, cache_bytes: int) -> int:
        """Return how many sequences' states fit in cache_bytes, up to `limit`. Raises ValueError for none."""
        num_slots = min(cache_bytes // self.slot_bytes - NUM_RESERVED_SLOTS, limit)
        if num_slots < 1:
            raise ValueError(
                f"no room for {NUM_RESERVED_SLOTS + 1} sequences' states: one takes {self.slot_bytes} "
                f"bytes, and there are only {cache_bytes}; give num_state_slots or kv_cache_bytes"
            )
        return num_slots

    def allocate(self, num_slots: int, device: torch.device) -> None:
        """Allocate memory for num_slots slots, including the reserved ones, or raise ValueError."""
        self.memory = []  # free the old memory first
        try:
            self.memory = [
                {
                    key: zeros_on_large_pages((num_slots, *spec.shape), spec.dtype, device)
                    for key, spec in specs.items()
                }
                for specs in self.specs
            ]
        except RuntimeError as error:  # torch.OutOfMemoryError on a GPU is one
            raise ValueError(
                f"too little memory for {num_slots} states of {self.slot_bytes} bytes; lower num_state_slots"
            ) from error

    @contextmanager
    def step(self, layout: StateLayout[Tensor]) -> Iterator[None]:
        """Run the model inside this context to have the mixers read and write the states of one step."""
        self._step, self._memories = layout, zip(self.memory, self.specs, strict=True)
        try:
            yield
        finally:
            self._step, self._memories = None, iter(())

    @contextmanager
    def probe(self) -> Iterator[None]:
        """Run the model inside this context to record `specs`. Each token is a sequence of its own."""
        self._probed = []
        try:
            yield
            self.specs = self._probed
        finally:
            self._probed = None

    def mix(self, mixer: Any, forward: Callable[..., Any], arguments: dict[str, Any], cache: str) -> Any:
        """Return a mixer's result for a flat batch, from several calls of its class's `forward`."""
        num_tokens = next(x.shape[1] for x in arguments.values() if isinstance(x, Tensor))
        outs: list[Any] = []
        places: list[Any] = []  # the tokens of each result

        def compute(place: Any, select: Callable[[Tensor], Tensor], past: Memory, is_prompt: bool) -> Memory:
            """Compute the tokens at a place, which `select` takes of (1, T, ...). Return their new states."""
            call = _Call(past)
            state = past.get(("recurrent", 0))
            heads = () if not isinstance(state, Tensor) else state.unbind(1) if state.dim() == 4 else (state,)
            self.initial = iter(heads)
            # Decoding has no limits, so a recomputed output has none either.
            self.time_limits = getattr(mixer, "time_step_limit", NO_LIMITS) if is_prompt else NO_LIMITS
            out = forward(mixer, **{**_map(arguments, num_tokens, select), cache: call})
            if isinstance(out, tuple):  # MiniMax also returns its state, which has no row per token
                kept = {id(state) for state in call.states.values()}
                out = tuple(None if id(x) in kept else x for x in out)
            outs.append(out)
            places.append(place)
            return call.states

        if self._probed is not None:
            states = compute(slice(None), lambda x: x.transpose(0, 1), {}, True)
            self._probed.append({key: _spec_of(mixer, key, x) for key, x in states.items()})
            return _merge(outs, places, num_tokens)
        assert self._step is not None
        (memory, specs), layout = next(self._memories), self._step
        if num_decodes := len(layout.decode_rows):
            rows: Any = layout.decode_rows if num_decodes < num_tokens else slice(None)
            slots = layout.decode_sources, layout.decode_targets
            in_place = {key for key in memory if self.kernels is not None and specs[key].has_kernel}
            past = {
                key: InPlace(x, *slots) if key in in_place else x.index_select(0, slots[0])
                for key, x in memory.items()
            }
            states = compute(rows, lambda x: x[0, rows].unsqueeze(1), past, False)
            for key, x in states.items():
                if not isinstance(x, InPlace):
                    memory[key].index_copy_(0, layout.decode_targets, x.to(memory[key].dtype))
        for first, end, source, target, is_prompt in layout.parts:
            # A mixer may write to the state it gets, and the source must not change: pass a copy.
            past = {key: x[source : source + 1].clone() for key, x in memory.items() if source != ZERO_SLOT}
            span = slice(first, end)
            for key, x in compute(span, itemgetter((slice(None), span)), past, is_prompt).items():
                memory[key][target] = x[0]
        return _merge(outs, places, num_tokens)


def _spec_of(mixer: Any, key: Key, state: Tensor) -> StateSpec:
    """Return the spec of a mixer's state, given the states of N sequences, (N, ...)."""
    kind, number = key
    if kind == "conv":
        like = [(*x.weight[:, 0].shape, x.weight.dtype) for x in mixer.children() if isinstance(x, nn.Conv1d)]
        has_kernel = like[:1] == [(*state.shape[1:], state.dtype)]
        has_kernel = has_kernel and "causal_conv1d_update" in mixer.stand_ins
    else:
        dims = max((STEPS[name] for name in STEPS.keys() & mixer.stand_ins), default=None)
        has_kernel = state.dim() == dims and state.dtype == torch.float32
    return StateSpec(tuple(state.shape[1:]), state.dtype, has_kernel and number == 0)


def _take_over(mixer: nn.Module, states: States) -> None:
    """Replace a mixer's forward pass with one that computes a flat batch through `States.mix`."""
    kind = type(mixer)
    forward: Any = FORWARDS.get(kind.__name__) or inspect.unwrap(kind.forward)
    stand_ins = {
        name: partial(stand_in, states, forward.__globals__[name])
        for name, stand_in in STAND_INS.items()
        if name in forward.__code__.co_names
    }
    if stand_ins:
        forward = _with_globals(forward, stand_ins)
    if isinstance(getattr(mixer, "dt_proj", None), nn.Linear):  # the mixer reads its weight: never pack it
        mixer.dt_proj.__class__ = type("Linear", (nn.Linear,), {})
    names = [*inspect.signature(forward).parameters][1:]
    cache = next(name for name in CACHE_NAMES if name in names)

    def mix(self: Any, *args: Any, **kwargs: Any) -> Any:
        return states.mix(self, forward, {**dict(zip(names, args, strict=False)), **kwargs}, cache)

    mixer.__class__ = type(kind.__name__, (kind,), {"forward": mix, "stand_ins": frozenset(stand_ins)})


def _with_globals(function: Any, names: dict[str, Any]) -> FunctionType:
    """Return a copy of a function for which these names have other values than in its module."""
    given = function.__name__, function.__defaults__, function.__closure__
    copy = FunctionType(function.__code__, {**function.__globals__, **names}, *given)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# ---- Stand-ins for transformers' functions in the code of mixers ---------------------------------
# The first arguments are the model's states and transformers' function, which computes if there is no kernel.


def _lay_out(state: Any, *shape: int) -> tuple[Tensor, tuple[Tensor, Tensor], Any]:
    """Return where a kernel finds a call's states: the memory, the slots to read and write, the new state."""
    if isinstance(state, InPlace):
        return state.memory, state.slots, state
    memory = torch.zeros(shape) if state is None else state.float().contiguous()
    slots = torch.arange(len(memory))
    return memory, (slots, slots), memory


SCANNED_TOKENS = 64  # tokens scanned at a time, to limit memory: each has a state of its own


def _scan_of_mamba(
    states: States, function: Any, *tensors: Tensor, D: Tensor, z: Tensor, delta_bias: Any, **kwargs: Any
) -> Any:
    """Scan like Mamba from the given state. transformers' scan always starts from zero.

    x, dt and z are (N, I, T), A (I, S), B and C (N, S, T), D and delta_bias (I,).
    """
    x, dt, A, B, C = tensors
    state = next(states.initial, None)
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[:, None]
    dt = nn.functional.softplus(dt)
    if states.kernels is not None:
        memory, slots, new = _lay_out(state, len(x), *A.shape)
        of_x, of_dt, of_B, of_C = (y.transpose(1, 2) for y in (x, dt, B, C))
        out = states.kernels.mamba(of_x, of_dt, A, of_B, of_C, memory, slots).transpose(1, 2)
    else:
        new = x.new_zeros(len(x), *A.shape, dtype=torch.float32) if state is None else state.float()
        outs = []
        for first in range(0, x.shape[2], SCANNED_TOKENS):
            of_x, of_dt, of_B, of_C = (y[..., first : first + SCANNED_TOKENS] for y in (x, dt, B, C))
            decays = torch.exp(A[None, :, None, :] * of_dt[..., None]).float()
            after = of_dt[..., None] * of_B.transpose(1, 2)[:, None].float() * of_x[..., None].float()
            after[:, :, 0] += decays[:, :, 0] * new
            distance = 1  # each round adds what the tokens so far before have left (Hillis and Steele's scan)
            while distance < after.shape[2]:
                after[:, :, distance:] += decays[:, :, distance:] * after[:, :, :-distance]
                decays[:, :, distance:] *= decays[:, :, :-distance].clone()
                distance *= 2
            outs.append(torch.einsum("nits,nst->nit", after.to(x.dtype), of_C))
            new = after[:, :, -1]
        out = torch.cat(outs, -1)
    return (out + x * D[:, None]) * nn.functional.silu(z), new


def _step_of_mamba(states: States, function: Any, state: Any, *tensors: Tensor, **kwargs: Any) -> Any:
    """Compute one token like Mamba: x and dt (N, I), A (I, S), B and C (N, S), D (I,)."""
    if not isinstance(state, InPlace):
        return function(state, *tensors, **kwargs)
    x, dt, A, B, C, D = tensors
    x, dt, B, C, z = (y.unsqueeze(-1) for y in (x, dt, B, C, kwargs["z"]))
    states.initial = iter((state,))
    out, _ = _scan_of_mamba(states, function, x, dt, A, B, C, D=D, z=z, delta_bias=kwargs["dt_bias"])
    return out[..., 0].to(x.dtype)


def _delta_rule(
    states: States, function: Any, *qkv: Tensor, g: Tensor, beta: Tensor, initial_state: Any, **kwargs: Any
) -> Any:
    """Compute a gated delta rule, for a span or for one token.

    q and k are (N, T, K, D), v (N, T, H, V), g (N, T, H) or (N, T, H, D), beta (N, T, H).
    """
    if states.kernels is None or not kwargs["use_qk_l2norm_in_kernel"]:
        if isinstance(initial_state, InPlace):
            initial_state = initial_state.memory.index_select(0, initial_state.slots[0])
        return function(*qkv, g=g, beta=beta, initial_state=initial_state, **kwargs)
    q, k, v = (x.to(qkv[2].dtype).contiguous() for x in qkv)
    memory, slots, new = _lay_out(initial_state, len(v), v.shape[2], k.shape[3], v.shape[3])
    decay, rate = g.float().contiguous(), beta.float().contiguous()
    return states.kernels.delta_rule(q, k, v, decay, rate, memory, slots), new


def _step_of_convolution(
    states: States,
    function: Any,
    x: Tensor,
    conv_state: Any,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """Convolve one token, x (N, C, 1), with weight (C, W) and bias (C,)."""
    if not isinstance(conv_state, InPlace):
        return function(x, conv_state, weight, bias, activation)
    is_silu = activation in ("silu", "swish")
    rows, kept = x[..., 0].contiguous(), (conv_state.memory, conv_state.slots)
    out = states.kernels.conv_step(rows, weight.contiguous(), bias, *kept, is_silu).unsqueeze(-1)
    return out if is_silu or activation is None else ACT2FN[activation](out)


def _step_of_mamba2(
    states: States, function: Any, state: Any, *tensors: Tensor, dt_bias: Tensor, **kwargs: Any
) -> Any:
    """Compute one token like Mamba2. A prompt's token has the same limits as in a scan.

    x is (N, H, P), B and C (N, G, S). dt (N, H, P), A (H, P, S), D and dt_bias (H, P) repeat values of heads.
    """
    x, dt, A, B, C, D = tensors
    if states.kernels is None:
        dt = nn.functional.softplus(dt + dt_bias.to(dt.dtype)).clamp(*states.time_limits)
        return function(state, x, dt, A, B, C, D, **{**kwargs, "dt_softplus": False})
    span = x[:, None], dt[:, None, :, 0], A[:, 0, 0], B[:, None], C[:, None]
    of_heads = {"D": D[:, 0], "dt_bias": dt_bias[:, 0], "initial_states": state}
    out, new = _scan_of_mamba2(states, function, *span, **of_heads)
    if isinstance(state, Tensor) and new is not state:
        state.copy_(new)
    z = kwargs.get("z")
    return out[:, 0] if z is None else out[:, 0] * nn.functional.silu(z)


def _scan_of_mamba2(states: States, function: Any, *tensors: Tensor, **kwargs: Any) -> Any:
    """Scan like Mamba2: x (N, T, H, P), dt (N, T, H), A (H,), B and C (N, T, G, S)."""
    if states.kernels is None:
        return function(*tensors, **{**kwargs, "dt_limit": states.time_limits})
    x, dt, A, B, C = tensors
    memory, slots, new = _lay_out(kwargs["initial_states"], len(x), *x.shape[2:], B.shape[3])
    dt = nn.functional.softplus((dt + kwargs["dt_bias"].to(dt.dtype)).float()).clamp(*states.time_limits)
    return states.kernels.mamba2(x, dt, A, B, C, kwargs["D"], memory, slots), new


def _griffin_block(
    self: Any, input_states: Tensor, position_ids: Tensor, *, cache_params: _Call, **_: Any
) -> Any:
    """Compute RecurrentGemma's block, with its states in the cache instead of in the modules."""
    num_tokens = input_states.shape[1]
    x = self.linear_x(input_states).transpose(1, 2)
    x = cache_params.update_conv_state(x, 0, conv_kernel_size=self.conv1d_width - 1)
    x = self.conv_1d(x)[..., : x.shape[-1]][..., -num_tokens:]
    self.rg_lru.recurrent_states = cache_params.get_recurrent_state(0)
    x = self.rg_lru(x.transpose(1, 2), position_ids)
    cache_params.update_recurrent_state(self.rg_lru.recurrent_states, 0)
    self.rg_lru.recurrent_states = None
    return self.linear_out(x * self.act_fn(self.linear_y(input_states))), None


# Forward passes of mixers whose own code does not use the cache.
FORWARDS: dict[str, Callable[..., Any]] = {"RecurrentGemmaRecurrentBlock": _griffin_block}
# transformers' function -> its stand-in
STAND_INS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_update": _step_of_convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
    "mamba_selective_scan": _scan_of_mamba,
    "mamba_selective_state_update": _step_of_mamba,
    "mamba2_chunk_scan": _scan_of_mamba2,
    "mamba2_selective_state_update": _step_of_mamba2,
}
# The stand-ins that compute a step in place, and the number of dimensions of their state, (N, ...).
STEPS = {
    "torch_recurrent_gated_delta_rule": 4,
    "recurrent_kimi_delta_attention": 4,
    "mamba_selective_state_update": 3,
    "mamba2_selective_state_update": 4,
}


def _map(value: Any, num_tokens: int, select: Callable[[Tensor], Tensor]) -> Any:
    """Return an argument with `select` applied to every tensor in it that is (1, T, ...)."""
    if isinstance(value, Tensor):
        return select(value) if value.shape[:2] == (1, num_tokens) else value
    if isinstance(value, tuple):
        return tuple(_map(x, num_tokens, select) for x in value)
    if isinstance(value, dict):
        return {key: _map(x, num_tokens, select) for key, x in value.items()}
    return value


def _merge(outs: list[Any], places: list[Any], num_tokens: int) -> Any:
    """Merge results (N, 1, ...) and (1, T, ...), or tuples, into (1, num_tokens, ...). Others become None."""
    if isinstance(outs[0], tuple):
        return tuple(_merge(list(of_one), places, num_tokens) for of_one in zip(*outs, strict=True))
    if not isinstance(outs[0], Tensor):
        return None
    if len(outs) == 1:
        return outs[0].reshape(1, num_tokens, *outs[0].shape[2:])
    merged = outs[0].new_empty(1, num_tokens, *outs[0].shape[2:])
    for out, place in zip(outs, places, strict=True):
        merged[0, place] = out.flatten(0, 1)
    return merged
