"""Layers that hand a state from token to token: convolutions, state-space models, linear attention.

Such a layer, here a mixer, asks transformers' cache for its states and gives it the new ones, all mixers by
the same few methods. `States` has a stand-in answer them, from memory that has a slot per sequence
(extensions/states.py hands these out), and calls a mixer several times for a flat batch: once for all
sequences that compute one token, as (N, 1, E), and once for each longer part of one, as (1, T, E).

Shape letters: T tokens of a step, N sequences that compute one token, E hidden size.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from nanoengine.backends.inputs import ZERO_SLOT, StateLayout
from nanoengine.backends.memory import resident_zeros

Limit = tuple[float, float]  # of Mamba2's time steps
NO_LIMIT: Limit = (0.0, math.inf)
Key = tuple[str, int]  # "conv" or "recurrent", and the number that a mixer gives it
Memory = dict[Key, Any]  # a mixer's states, a tensor (slots, ...) each; of one call also `InPlace`


class StateSpec(NamedTuple):
    """A state that one mixer keeps for a sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_kernel: bool  # whether one makes its steps where it lies, on a processor that has kernels

    @property
    def num_bytes(self) -> int:
        """Of one sequence."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class _Call:
    """What a mixer takes for transformers' cache: the states of the sequences of one call, one per row.

    Those of sequences without a past are absent, which transformers' code takes for zeros.
    """

    def __init__(self, past: Memory) -> None:
        self.states = past

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a convolution, (N, ..., its width); a mixer may write into it."""
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Any other state, (N, ...); a mixer may write into it."""
        return self.states.get(("recurrent", state_idx))

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Whether the sequences have a past."""
        return bool(self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether more than a convolution's width is kept of its inputs."""
        return False

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Keep the end of the inputs, new ones being (N, ..., T); returns those before and the new ones."""
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
        """Keep a new state."""
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """The same under MiniMax's names."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, states: Tensor) -> None:
        """As update_recurrent_state."""
        self.update_recurrent_state(states, layer_idx)


class InPlace:
    """States of several sequences where they lie, for a kernel that reads and writes them there."""

    def __init__(self, memory: Tensor, sources: Tensor, targets: Tensor) -> None:
        self.memory, self.slots = memory, (sources, targets)

    def to(self, dtype: torch.dtype) -> "InPlace":
        """As a tensor's; a kernel takes the dtype they have."""
        return self

    def read(self) -> Tensor:
        """A copy, (N, ..)."""
        return self.memory.index_select(0, self.slots[0])


class States:
    """The mixers of a model, and their memory.

    Args:
        model: of transformers. Its mixers are given another `forward`, which computes as theirs does.
    """

    def __init__(self, model: nn.Module) -> None:
        self.specs: list[dict[Key, StateSpec]] = []  # by mixer, in the order of calls; filled by a probe
        self.memory: list[Memory] = []  # the same
        self.kernels: Any = None  # a CPU's
        # No mixer may be referred to, here or by what stands in for functions: a circle holds the weights
        # until the garbage collector comes.
        mixers = [module for module in model.modules() if is_mixer(type(module))]
        for mixer in mixers:
            _take_over(mixer, self)
        self._num_mixers = len(mixers)
        self._step: StateLayout[Tensor] | None = None
        self._probed: list[dict[Key, StateSpec]] | None = None
        self._memories: Iterator[tuple[Memory, dict[Key, StateSpec]]] = iter(())  # of the mixers to come
        # Of the call in progress, for what stands in for functions of transformers:
        self.initial: Iterator[Tensor] = iter(())  # the recurrent state, or each head's; none: zeros
        self.is_prompt = False

    def __bool__(self) -> bool:
        """Whether there are any mixers."""
        return self._num_mixers > 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of all states of a sequence."""
        return sum(spec.num_bytes for specs in self.specs for spec in specs.values())

    def allocate(self, num_slots: int, device: torch.device) -> None:
        """Make memory of so many slots, the reserved ones among them.

        Raises:
            ValueError: there is not so much.
        """
        self.memory = []  # what there was is given back first
        try:
            self.memory = [
                {
                    key: resident_zeros((num_slots, *spec.shape), spec.dtype, device)
                    for key, spec in specs.items()
                }
                for specs in self.specs
            ]
        except RuntimeError as error:  # torch.OutOfMemoryError on a GPU is one
            raise ValueError(
                f"no memory for {num_slots} states of {self.slot_bytes} bytes; lower num_state_slots"
            ) from error

    @contextmanager
    def step(self, layout: StateLayout[Tensor]) -> Iterator[None]:
        """A `with` block in which the mixers compute that step."""
        self._step, self._memories = layout, zip(self.memory, self.specs, strict=True)
        try:
            yield
        finally:
            self._step, self._memories = None, iter(())

    @contextmanager
    def probe(self) -> Iterator[None]:
        """A `with` block in which each token is a sequence of its own; what states there are is noted."""
        self._probed = []
        try:
            yield
            self.specs = self._probed
        finally:
            self._probed = None

    def mix(self, mixer: Any, forward: Callable[..., Any], arguments: dict[str, Any], cache: str) -> Any:
        """What a mixer gives for a flat batch: its own forward pass, call by call.

        Args:
            mixer: one of the model's.
            forward: its class's own, of transformers.
            arguments: for it, by name.
            cache: the name of the one that takes transformers' cache.
        """
        num_tokens = next(x.shape[1] for x in arguments.values() if isinstance(x, Tensor))

        def compute(select: Callable[[Tensor], Tensor], past: Memory, is_prompt: bool) -> tuple[Any, Memory]:
            """The mixer's result and new states for some tokens: those that `select` gives of (1, T, ..)."""
            call = _Call(past)
            state = past.get(("recurrent", 0))
            heads = () if not isinstance(state, Tensor) else state.unbind(1) if state.dim() == 4 else (state,)
            self.initial = iter(heads)
            self.is_prompt = is_prompt
            out = forward(mixer, **{**_map(arguments, num_tokens, select), cache: call})
            if isinstance(out, tuple):  # MiniMax's also returns its new state, which has no row per token
                kept = {id(state) for state in call.states.values()}
                out = tuple(None if id(x) in kept else x for x in out)
            return out, call.states

        if self._probed is not None:
            out, states = compute(lambda x: x.transpose(0, 1), {}, True)
            self._probed.append({key: _spec_of(mixer, key, x) for key, x in states.items()})
            return _merge([out], [], num_tokens)
        assert self._step is not None
        (memory, specs), layout = next(self._memories), self._step
        outs: list[Any] = []
        places: list[Any] = []
        if num_decodes := len(layout.decode_rows):
            rows: Any = layout.decode_rows if num_decodes < num_tokens else slice(None)
            slots = layout.decode_sources, layout.decode_targets
            past = {
                key: InPlace(x, *slots)
                if self.kernels is not None and specs[key].has_kernel
                else x.index_select(0, slots[0])
                for key, x in memory.items()
            }
            out, states = compute(lambda x: x[0, rows].unsqueeze(1), past, False)
            outs.append(out)
            places.append(rows)
            for key, x in states.items():
                if not isinstance(x, InPlace):
                    memory[key].index_copy_(0, layout.decode_targets, x.to(memory[key].dtype))
        for first, end, source, target, is_prompt in layout.parts:
            # A copy of what must stay as it is: a mixer writes into the state it is given.
            past = {key: x[source : source + 1].clone() for key, x in memory.items() if source != ZERO_SLOT}
            out, states = compute(partial(_rows, first, end), past, is_prompt)
            outs.append(out)
            places.append(slice(first, end))
            for key, x in states.items():
                memory[key][target] = x[0]
        return _merge(outs, places, num_tokens)


def _spec_of(mixer: Any, key: Key, state: Tensor) -> StateSpec:
    """What a mixer's state is like, (N, ..)."""
    kind, number = key
    if kind == "conv":
        like = [(*x.weight[:, 0].shape, x.weight.dtype) for x in mixer.children() if isinstance(x, nn.Conv1d)]
        has_kernel = (
            like[:1] == [(*state.shape[1:], state.dtype)] and "causal_conv1d_update" in mixer.stand_ins
        )
    else:
        dims = max((STEPS[name] for name in STEPS.keys() & mixer.stand_ins), default=None)
        has_kernel = state.dim() == dims and state.dtype == torch.float32
    return StateSpec(tuple(state.shape[1:]), state.dtype, has_kernel and number == 0)


def is_mixer(kind: type) -> bool:
    """Whether modules of that class keep states in transformers' cache: whether their code says so."""
    forward = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    if kind.__name__ in FORWARDS:
        return True
    return not {"update_conv_state", "update_recurrent_state", "set_linear_cache"}.isdisjoint(names)


def _take_over(mixer: nn.Module, states: States) -> None:
    """Give a mixer a forward pass that computes a flat batch by its own."""
    kind = type(mixer)
    forward: Any = FORWARDS.get(kind.__name__) or inspect.unwrap(kind.forward)
    stand_ins = {
        name: make(states, forward.__globals__[name], getattr(mixer, "time_step_limit", NO_LIMIT))
        for name, make in STAND_INS.items()
        if name in forward.__code__.co_names
    }
    if stand_ins:
        known = {**forward.__globals__, **stand_ins}
        code, given = forward.__code__, (forward.__name__, forward.__defaults__, forward.__closure__)
        forward = FunctionType(code, known, *given)
    if isinstance(getattr(mixer, "dt_proj", None), nn.Linear):  # whose weight they read by themselves
        mixer.dt_proj.__class__ = type("Linear", (nn.Linear,), {})
    names = [*inspect.signature(forward).parameters][1:]
    cache = "cache_params" if "cache_params" in names else "past_key_values"

    def mix(self: Any, *args: Any, **kwargs: Any) -> Any:
        return states.mix(self, forward, {**dict(zip(names, args, strict=False)), **kwargs}, cache)

    mixer.__class__ = type(kind.__name__, (kind,), {"forward": mix, "stand_ins": frozenset(stand_ins)})


# ---- What a mixer's code gets in place of transformers' own functions ----------------------------


def _lay_out(state: Any, *shape: int) -> tuple[Tensor, tuple[Tensor, Tensor], Any]:
    """Of a call's states: their memory, the slots to read and to write, and what is the new state then."""
    if isinstance(state, InPlace):
        return state.memory, state.slots, state
    memory = torch.zeros(shape) if state is None else state.float().contiguous()
    slots = torch.arange(len(memory))
    return memory, (slots, slots), memory


def _scan_of_mamba(states: States, function: Any, limit: Limit) -> Callable[..., Any]:
    """Mamba's scan of a prompt, which begins at zero in transformers, from the state before it."""

    def scan(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        D: Tensor,
        z: Tensor,
        delta_bias: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Takes x, dt and z (N, I, T), A (I, S), B and C (N, S, T), D and delta_bias (I,)."""
        state = next(states.initial, None)
        if states.kernels is None and state is None:
            result: tuple[Tensor, Tensor] = function(
                x, dt, A, B, C, D=D, z=z, delta_bias=delta_bias, **kwargs
            )
            return result
        if delta_bias is not None:
            dt = dt + delta_bias.to(dt.dtype)[:, None]
        dt = nn.functional.softplus(dt)
        if states.kernels is not None:
            memory, slots, new = _lay_out(state, len(x), *A.shape)
            rows = (y.transpose(1, 2) for y in (x, dt, B, C))
            out = _mamba(states.kernels, A, *rows, memory, slots).transpose(1, 2)
        else:
            assert state is not None
            decays = torch.exp(A[None, :, None, :] * dt[..., None])
            inputs = dt[..., None] * B.transpose(1, 2)[:, None].float() * x[..., None].float()
            new, outs = state, []
            for t in range(x.shape[2]):
                new = decays[:, :, t] * new + inputs[:, :, t]
                outs.append((new.to(x.dtype) @ C[:, :, t, None])[..., 0])
            out = torch.stack(outs, -1)
        return (out + x * D[:, None]) * nn.functional.silu(z), new

    return scan


def _step_of_mamba(states: States, function: Any, limit: Limit) -> Callable[..., Any]:
    """Mamba's step of one token, by a kernel."""

    def step(
        state: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, **kwargs: Any
    ) -> Any:
        """Takes x and dt (N, I), A (I, S), B and C (N, S), D (I,)."""
        if not isinstance(state, InPlace):
            return function(state, x, dt, A, B, C, D, **kwargs)
        if kwargs["dt_bias"] is not None:
            dt = dt + kwargs["dt_bias"].to(dt.dtype)
        rows = (y.unsqueeze(1) for y in (x, nn.functional.softplus(dt), B, C))
        out = _mamba(states.kernels, A, *rows, state.memory, state.slots)[:, 0]
        return ((out + x * D) * nn.functional.silu(kwargs["z"])).to(x.dtype)

    return step


def _mamba(kernels: Any, A: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, *state: Any) -> Tensor:
    """By the kernel, x (N, T, I), dt (N, T, I), B and C (N, T, S)."""
    x, dt, b, c = (y.contiguous() for y in (x, dt.float(), B.to(x.dtype), C.to(x.dtype)))
    out: Tensor = kernels.mamba(x, dt, A.contiguous(), b, c, *state)
    return out


def _delta_rule(states: States, function: Any, limit: Limit) -> Callable[..., Any]:
    """The gated delta rule, of a prompt or of one token, by a kernel."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Any, **kwargs: Any
    ) -> Any:
        """Takes q and k (N, T, K, D), v (N, T, H, V), g (N, T, H) or (N, T, H, D), beta (N, T, H)."""
        if states.kernels is None or not kwargs["use_qk_l2norm_in_kernel"]:
            if isinstance(initial_state, InPlace):
                initial_state = initial_state.read()
            return function(query, key, value, g=g, beta=beta, initial_state=initial_state, **kwargs)
        memory, slots, new = _lay_out(initial_state, len(value), value.shape[2], key.shape[3], value.shape[3])
        q, k, v = (x.to(value.dtype).contiguous() for x in (query, key, value))
        decay, rate = g.float().contiguous(), beta.float().contiguous()
        return states.kernels.delta_rule(q, k, v, decay, rate, memory, slots), new

    return attend


def _step_of_convolution(states: States, function: Any, limit: Limit) -> Callable[..., Any]:
    """A convolution's step of one token, by a kernel."""

    def step(
        x: Tensor, conv_state: Any, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
    ) -> Any:
        """Takes x (N, C, 1), weight (C, W), bias (C,)."""
        if not isinstance(conv_state, InPlace):
            return function(x, conv_state, weight, bias, activation)
        is_silu = activation in ("silu", "swish")
        rows, kept = x[..., 0].contiguous(), (conv_state.memory, conv_state.slots)
        out = states.kernels.conv_step(rows, weight.contiguous(), bias, *kept, is_silu).unsqueeze(-1)
        return out if is_silu or activation is None else ACT2FN[activation](out)

    return step


def _step_of_mamba2(states: States, function: Any, limit: Limit) -> Callable[..., Any]:
    """Mamba2's step of one token. Some models limit a prompt's time steps, though in this step they don't."""

    def step(
        state: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        *,
        dt_bias: Tensor,
        **kwargs: Any,
    ) -> Any:
        """Takes x (N, H, P), B and C (N, G, S); dt (N, H, P), A (H, P, S), D, dt_bias (H, P) are a head's."""
        low, high = limit if states.is_prompt else NO_LIMIT
        if states.kernels is None:
            dt = nn.functional.softplus(dt + dt_bias.to(dt.dtype)).clamp(low, high)
            return function(state, x, dt, A, B, C, D, **{**kwargs, "dt_softplus": False})
        memory, slots, new = _lay_out(state)
        dt = nn.functional.softplus((dt[..., 0] + dt_bias[:, 0].to(dt.dtype)).float()).clamp(low, high)
        rows = (y.unsqueeze(1) for y in (x, dt, B, C))
        out = _mamba2(states.kernels, A[:, 0, 0], D[:, 0], *rows, memory, slots)[:, 0]
        if isinstance(state, Tensor) and new is not state:
            state.copy_(new)
        z = kwargs.get("z")
        return out if z is None else out * nn.functional.silu(z)

    return step


def _scan_of_mamba2(states: States, function: Any, limit: Limit) -> Callable[..., Any]:
    """Mamba2's scan of a prompt, by a kernel. An answer computed anew is computed without a limit."""

    def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **kwargs: Any) -> Any:
        """Takes x (N, T, H, P), dt (N, T, H), A (H,), B and C (N, T, G, S)."""
        if not states.is_prompt:
            kwargs["dt_limit"] = NO_LIMIT
        if states.kernels is None:
            return function(x, dt, A, B, C, **kwargs)
        memory, slots, new = _lay_out(kwargs["initial_states"], len(x), *x.shape[2:], B.shape[3])
        dt = nn.functional.softplus((dt + kwargs["dt_bias"].to(dt.dtype)).float()).clamp(*kwargs["dt_limit"])
        return _mamba2(states.kernels, A, kwargs["D"], x, dt, B, C, memory, slots), new

    return scan


def _mamba2(
    kernels: Any, A: Tensor, D: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, *state: Any
) -> Tensor:
    """By the kernel, x (N, T, H, P), dt (N, T, H), B and C (N, T, G, S), A and D (H,)."""
    x, dt, b, c = (y.contiguous() for y in (x, dt, B.to(x.dtype), C.to(x.dtype)))
    a, d = A.float().contiguous(), D.float().contiguous()
    out: Tensor = kernels.mamba2(x, dt, a, b, c, d, *state)
    return out


def _griffin_block(
    self: Any, input_states: Tensor, position_ids: Tensor, *, cache_params: _Call, **_: Any
) -> Any:
    """RecurrentGemma's, which keeps its states in the modules."""
    num_tokens = input_states.shape[1]
    x = self.linear_x(input_states).transpose(1, 2)
    x = cache_params.update_conv_state(x, 0, conv_kernel_size=self.conv1d_width - 1)
    x = self.conv_1d(x)[..., : x.shape[-1]][..., -num_tokens:]
    self.rg_lru.recurrent_states = cache_params.get_recurrent_state(0)
    x = self.rg_lru(x.transpose(1, 2), position_ids)
    cache_params.update_recurrent_state(self.rg_lru.recurrent_states, 0)
    self.rg_lru.recurrent_states = None
    return self.linear_out(x * self.act_fn(self.linear_y(input_states))), None


# Of mixers whose own does not ask the cache.
FORWARDS: dict[str, Callable[..., Any]] = {"RecurrentGemmaRecurrentBlock": _griffin_block}
# Of transformers' functions, by name: made of the model's states, of the function, and of a mixer's limits.
STAND_INS: dict[str, Callable[[States, Any, Limit], Callable[..., Any]]] = {
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
# Those that make a step where the state lies, and its dimensions with the first, of sequences.
STEPS = {
    "torch_recurrent_gated_delta_rule": 4,
    "recurrent_kimi_delta_attention": 4,
    "mamba_selective_state_update": 3,
    "mamba2_selective_state_update": 4,
}


def _rows(first: int, end: int, x: Tensor) -> Tensor:
    """Of (1, T, ..)."""
    return x[:, first:end]


def _map(value: Any, num_tokens: int, select: Callable[[Tensor], Tensor]) -> Any:
    """An argument with `select` of every tensor in it that is (1, T, ..)."""
    if isinstance(value, Tensor):
        return select(value) if value.shape[:2] == (1, num_tokens) else value
    if isinstance(value, tuple):
        return tuple(_map(x, num_tokens, select) for x in value)
    if isinstance(value, dict):
        return {key: _map(x, num_tokens, select) for key, x in value.items()}
    return value


def _merge(outs: list[Any], places: list[Any], num_tokens: int) -> Any:
    """Put results (N, 1, ..) and (1, T, ..), or tuples of them, in their places of one that is (1, T, ..).

    Other values in a tuple become None: no layer reads them.
    """
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
