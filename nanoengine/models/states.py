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

from nanoengine.backends.inputs import ZERO_SLOT, StateLayout

Key = tuple[str, int]  # "conv" or "recurrent", and the number that a mixer gives it
Memory = dict[Key, Tensor]  # a mixer's states, (slots, ...) each


class StateSpec(NamedTuple):
    """A state that one mixer keeps for a sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

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


class States:
    """The mixers of a model, and their memory.

    Args:
        model: of transformers. Its mixers are given another `forward`, which computes as theirs does.
    """

    def __init__(self, model: nn.Module) -> None:
        self.specs: list[dict[Key, StateSpec]] = []  # by mixer, in the order of calls; filled by a probe
        self.memory: list[Memory] = []  # the same
        self._mixers = [module for module in model.modules() if is_mixer(type(module))]
        for mixer in self._mixers:
            _take_over(mixer, self)
        self._step: StateLayout[Tensor] | None = None
        self._probed: list[dict[Key, StateSpec]] | None = None
        self._memories: Iterator[Memory] = iter(())
        # Of the call in progress, for what stands in for functions of transformers:
        self.initial: Iterator[Tensor] = iter(())  # the recurrent state, or each head's; none: zeros
        self.is_prompt = False

    def __bool__(self) -> bool:
        """Whether there are any mixers."""
        return bool(self._mixers)

    @property
    def slot_bytes(self) -> int:
        """Bytes of all states of a sequence."""
        return sum(spec.num_bytes for specs in self.specs for spec in specs.values())

    def allocate(self, num_slots: int, device: torch.device) -> None:
        """Make memory of so many slots, the reserved ones among them."""
        self.memory = [
            {
                key: torch.zeros((num_slots, *spec.shape), dtype=spec.dtype, device=device)
                for key, spec in specs.items()
            }
            for specs in self.specs
        ]

    @contextmanager
    def step(self, layout: StateLayout[Tensor]) -> Iterator[None]:
        """A `with` block in which the mixers compute that step."""
        self._step, self._memories = layout, iter(self.memory)
        try:
            yield
        finally:
            self._step = None

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
            self.initial = iter(() if state is None else state.unbind(1) if state.dim() == 4 else (state,))
            self.is_prompt = is_prompt
            out = forward(mixer, **{**_map(arguments, num_tokens, select), cache: call})
            return out, call.states

        if self._probed is not None:
            out, states = compute(lambda x: x.transpose(0, 1), {}, True)
            self._probed.append({key: StateSpec(tuple(x.shape[1:]), x.dtype) for key, x in states.items()})
            return _merge([out], [], num_tokens)
        assert self._step is not None
        memory, layout = next(self._memories), self._step
        outs: list[Any] = []
        places: list[Any] = []
        if num_decodes := len(layout.decode_rows):
            rows: Any = layout.decode_rows if num_decodes < num_tokens else slice(None)
            past = {key: x.index_select(0, layout.decode_sources) for key, x in memory.items()}
            out, states = compute(lambda x: x[0, rows].unsqueeze(1), past, False)
            outs.append(out)
            places.append(rows)
            for key, x in states.items():
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
        name: make(states, mixer, forward.__globals__[name])
        for name, make in STAND_INS.items()
        if name in forward.__code__.co_names
    }
    if stand_ins:
        known = {**forward.__globals__, **stand_ins}
        forward = FunctionType(forward.__code__, known, forward.__name__, forward.__defaults__)
    if isinstance(getattr(mixer, "dt_proj", None), nn.Linear):  # whose weight they read by themselves
        mixer.dt_proj.__class__ = type("Linear", (nn.Linear,), {})
    names = [*inspect.signature(forward).parameters][1:]
    cache = "cache_params" if "cache_params" in names else "past_key_values"

    def mix(self: Any, *args: Any, **kwargs: Any) -> Any:
        return states.mix(self, forward, {**dict(zip(names, args, strict=False)), **kwargs}, cache)

    mixer.__class__ = type(kind.__name__, (kind,), {"forward": mix})


# ---- What a mixer's code gets in place of transformers' own functions ----------------------------


def _scan_from_a_state(states: States, mixer: nn.Module, function: Any) -> Callable[..., Any]:
    """Mamba's scan of a prompt, which begins at zero there, from the state before it."""

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
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """x, dt and z (N, I, T), A (I, S), B and C (N, S, T), D and delta_bias (I,): (N, I, T), (N, I, S)."""
        initial = next(states.initial, None)
        if delta_bias is not None:
            dt = dt + delta_bias.to(dt.dtype)[:, None]
        dt = nn.functional.softplus(dt)
        decays = torch.exp(A[None, :, None, :] * dt[..., None])
        inputs = dt[..., None] * B.transpose(1, 2)[:, None].float() * x[..., None].float()
        state = inputs.new_zeros(inputs[:, :, 0].shape) if initial is None else initial
        outs = []
        for t in range(x.shape[2]):
            state = decays[:, :, t] * state + inputs[:, :, t]
            outs.append((state.to(x.dtype) @ C[:, :, t, None])[..., 0])
        out = torch.stack(outs, -1) + x * D[:, None]
        return out * nn.functional.silu(z), state

    return scan


def _update_as_in_prompts(states: States, mixer: Any, function: Any) -> Callable[..., Any]:
    """Mamba2's step of one token. Of a prompt, some models limit the time steps; here they don't."""

    def update(state: Tensor, x: Tensor, dt: Tensor, *others: Any, dt_bias: Tensor, **kwargs: Any) -> Any:
        if states.is_prompt:
            dt = nn.functional.softplus(dt + dt_bias.to(dt.dtype)).clamp(*mixer.time_step_limit)
            return function(state, x, dt, *others, **{**kwargs, "dt_softplus": False})
        return function(state, x, dt, *others, dt_bias=dt_bias, **kwargs)

    return update


def _scan_as_in_answers(states: States, mixer: nn.Module, function: Any) -> Callable[..., Any]:
    """Mamba2's scan, where it computes an answer's tokens anew: without that limit, as they were drawn."""

    def scan(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **(kwargs if states.is_prompt else {**kwargs, "dt_limit": (0.0, math.inf)}))

    return scan


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
STAND_INS: dict[str, Callable[[States, Any, Any], Callable[..., Any]]] = {
    "mamba_selective_scan": _scan_from_a_state,
    "mamba2_selective_state_update": _update_as_in_prompts,
    "mamba2_chunk_scan": _scan_as_in_answers,
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
    """Results (N, 1, ..) and (1, T, ..), or tuples of them, in their places of one that is (1, T, ..).

    What in a tuple is no such result is None: nobody reads it.
    """
    if isinstance(outs[0], tuple):
        return tuple(_merge(list(of_one), places, num_tokens) for of_one in zip(*outs, strict=True))
    if not isinstance(outs[0], Tensor) or sum(x.shape[0] * x.shape[1] for x in outs) != num_tokens:
        return None
    if len(outs) == 1:
        return outs[0].reshape(1, num_tokens, *outs[0].shape[2:])
    merged = outs[0].new_empty(1, num_tokens, *outs[0].shape[2:])
    for out, place in zip(outs, places, strict=True):
        merged[0, place] = out.flatten(0, 1)
    return merged
