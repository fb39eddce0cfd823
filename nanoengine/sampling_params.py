"""Defines `SamplingParams`, the parameters of a request, and the checks for arguments that users pass."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import wraps
from numbers import Integral, Real
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args

Params = TypeVar("Params")
Arguments = ParamSpec("Arguments")


def check_integer(name: str, value: Any, low: int, high: int = 2**31 - 1) -> int:
    """Return the value as an int. Raises TypeError or ValueError unless it is an integer in [low, high]."""
    limits = f"an integer in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be {limits}, got {value!r}")
    if not low <= int(value) <= high:
        raise ValueError(f"{name} must be {limits}, got {value!r}")
    return int(value)


def check_number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> float:
    """Return the value as a float. Raises TypeError or ValueError unless it is in the given range."""
    limits = f"a number in {'(' if open_low else '['}{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be {limits}, got {value!r}")
    number: Any = value  # for mypy, a Real cannot be compared with a float
    if not low <= number <= high or (open_low and number == low):  # false for NaN
        raise ValueError(f"{name} must be {limits}, got {value!r}")
    return float(value)


def check_bool(name: str, value: Any) -> None:
    """Raise TypeError unless value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_strings(name: str, value: Any) -> list[str]:
    """Return the value as a list. Raises TypeError or ValueError unless it holds non-empty strings."""
    if not isinstance(value, list | tuple | set | frozenset):
        raise TypeError(f"{name} must be a list of strings, got {value!r}")
    for item in value:
        if not isinstance(item, str):
            raise TypeError(f"{name} must hold strings only, got {item!r}")
        if not item:
            raise ValueError(f"{name} must not hold an empty string, got {value!r}")
    return list(value)


def check_token_ids(name: str, value: Any) -> list[int]:
    """Return the value as a list. Raises TypeError or ValueError unless it holds token ids."""
    is_set = isinstance(value, set | frozenset) and name != "forced_token_ids"  # the order of which matters
    if not is_set and not isinstance(value, list | tuple):
        raise TypeError(f"{name} must be a list of token ids, got {value!r}")
    return [check_integer(name, item, 0) for item in value]


def choices(hint: Any) -> tuple[str, ...]:
    """Return the strings of a Literal, alone or in a union."""
    kinds = [one for kind in get_args(hint) for one in get_args(kind) or (kind,)]
    return tuple(one for one in kinds if isinstance(one, str))


def num_arguments(processor: Any) -> int:
    """Return how many arguments a logits processor takes. Raises TypeError unless it takes 2 or 3."""
    if isinstance(processor, type):
        raise TypeError(
            f"logits_processors must be functions, got the class {processor.__name__}; "
            "write a function (token_ids, logits) -> logits of one row instead"
        )
    for num in (2, 3):
        with suppress(TypeError, ValueError):  # ValueError: a built-in without a signature
            inspect.signature(processor).bind(*[None] * num)
            return num
    wanted = "the output's token ids and the logits, or the prompt's token ids before these"
    raise TypeError(f"logits_processors must take {wanted}, got {processor!r}")


def check_processors(given: Any) -> list[Callable[..., Any]]:
    """Return logits_processors as a list. Raises TypeError if they are not functions."""
    if not isinstance(given, list | tuple):
        raise TypeError(f"logits_processors must be a list, got {given!r}")
    for one in given:
        num_arguments(one)
    return list(given)


def refuse_unserved(call: Callable[..., Any], unserved: Mapping[str, Any]) -> None:
    """Apply the rule of unknown_arguments.py to keyword arguments for which a function has no parameter."""
    if unserved:
        from nanoengine.unknown_arguments import without_unserved

        without_unserved(call.__name__, unserved, inspect.signature(call).parameters.keys() - {"unserved"})


def accepts(kind: str = "", optional: Iterable[str] = ()) -> Callable[[type[Params]], type[Params]]:
    """Return a decorator that applies that rule to a class, with the names that are `IGNORED` for its kind.

    For `optional` arguments, None is the default.
    """

    def decorate(cls: type[Params]) -> type[Params]:
        make = cls.__init__
        served = inspect.signature(make).parameters.keys() - {"self"}

        @wraps(make)
        def __init__(self: Params, *model: Any, **given: Any) -> None:
            if not given.keys() <= served:
                from nanoengine.unknown_arguments import IGNORED, without_unserved

                given = without_unserved(cls.__name__, given, served, IGNORED.get(kind, ()))
            for name in optional:
                if name in given and given[name] is None:
                    del given[name]
            make(self, *model, **given)

        cls.__init__ = __init__  # type: ignore[assignment]
        return cls

    return decorate


def takes(
    config: Callable[Arguments, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, Arguments], None]]:
    """Return a decorator for an `__init__` that type checkers and editors give a config's parameters."""
    return lambda init: init


LARGEST = 1e30  # far below the overflow of float32
MAX_SAMPLES = 1024  # per prompt: every sample is a sequence with its own token list, made up front
# The limits of the fields; for those of OPTIONAL, None is allowed too
INTEGERS: dict[str, tuple[Any, ...]] = {"n": (1, MAX_SAMPLES), "top_k": (-1,), "min_tokens": (0,)}
OPTIONAL: dict[str, tuple[Any, ...]] = {"max_tokens": (1,), "seed": (-(2**63), 2**64 - 1)}
OPTIONAL |= dict.fromkeys(("logprobs", "prompt_logprobs", "truncate_prompt_tokens"), (-1,))
NUMBERS: dict[str, tuple[Any, ...]] = {
    **{"temperature": (0.0, LARGEST), "top_p": (0.0, 1.0, True), "min_p": (0.0, 1.0)},
    **{"presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0), "repetition_penalty": (1e-4, 1e4)},
}


class RequestOutputKind(Enum):
    """Selects what a request's outputs hold: everything so far, only what is new, or the final result."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True, kw_only=True)
class StructuredOutputsParams:
    """Constrains the output by one of the first six fields. Names are vLLM's. llguidance enforces it.

    Raises:
        TypeError, ValueError: none or several of the six fields are given, or a field has the wrong type.
    """

    json: str | dict[str, Any] | None = None  # a JSON schema
    regex: str | None = None  # a regular expression that the whole output must match
    choice: list[str] | None = None  # the output is one of these strings
    grammar: str | None = None  # in llguidance's variant of Lark (`start: ...`), or GBNF (`root ::= ...`)
    json_object: bool | None = None  # any JSON object
    structural_tag: str | dict[str, Any] | None = None  # free text; parts between tags follow a schema
    disable_any_whitespace: bool = False  # JSON on one line, without spaces
    disable_additional_properties: bool = False  # the default for objects whose schema does not set it
    whitespace_pattern: str | None = None  # a regular expression for the whitespace between JSON tokens
    preamble: str | None = None  # grammar, in llguidance's Lark, of text before the output, such as reasoning

    def __post_init__(self) -> None:
        """Check types, and that exactly one of the six fields is given."""
        kinds: dict[str, tuple[type, ...]] = {"json": (str, dict), "structural_tag": (str, dict)}
        kinds |= {"regex": (str,), "grammar": (str,), "choice": (list, tuple), "json_object": (bool,)}
        for name, kind in (kinds | {"whitespace_pattern": (str,), "preamble": (str,)}).items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                names = " or ".join(one.__name__ for one in kind)
                raise TypeError(f"structured_outputs.{name} must be a {names}, got {value!r}")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            check_bool(f"structured_outputs.{name}", getattr(self, name))
        if self.choice is not None and not self.choice:
            raise ValueError("structured_outputs.choice must not be empty, got []")
        if self.choice is not None and not all(isinstance(one, str) for one in self.choice):
            raise TypeError(f"structured_outputs.choice must hold strings only, got {self.choice!r}")
        if (num := sum(getattr(self, name) not in (None, False) for name in kinds)) != 1:
            raise ValueError(f"structured_outputs must have one of {', '.join(kinds)}, got {num} of them")


@accepts("sampling")
@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Says how to sample, when to stop and what to report. Names and defaults are vLLM's.

    The fields are checked at construction, and again when a request is made. The request keeps a copy, so
    you may change fields before and after that.

    Raises:
        TypeError, ValueError: a field has the wrong type or is out of range.
    """

    n: int = 1  # samples per prompt, which share the blocks of its KV cache
    temperature: float = 1.0  # randomness; 0 takes the most probable token (greedy)
    top_p: float = 1.0  # keep the most probable tokens up to and including the one that crosses top_p
    top_k: int = 0  # keep the k most probable tokens; 0 or -1: all
    min_p: float = 0.0  # keep tokens at least min_p times as probable as the most probable one
    seed: int | None = None  # seed of the request; None or -1: derived from the engine's seed
    presence_penalty: float = 0.0  # subtracted once from the logit of each token in the output
    frequency_penalty: float = 0.0  # subtracted from a token's logit per occurrence in the output
    repetition_penalty: float = 1.0  # divides positive and multiplies negative logits of tokens already seen
    logit_bias: dict[int, float] | None = None  # added to the logits of these token ids
    allowed_token_ids: list[int] | None = None  # no other token may be sampled
    forced_token_ids: list[int] | None = None  # the output begins with these tokens, in place of samples
    # words that are banned as the tokenizer spells them: at the start of a text, and after white space or an
    # ASCII punctuation mark. Other tokens can still form the same text
    bad_words: list[str] | None = None
    max_tokens: int | None = 16  # limit on the output, in tokens; None: up to max_model_len
    min_tokens: int = 0  # no end of sequence, stop token or stop string before this many output tokens
    ignore_eos: bool = False  # go on after the token that ends a sequence
    stop: str | list[str] | None = None  # ends the output before the first of these strings
    stop_token_ids: list[int] | None = None  # ends the output after any of these tokens
    include_stop_str_in_output: bool = False  # keep the stop string at the end of the text
    logprobs: int | None = None  # report the sampled token and this many most probable ones; -1: all
    truncate_prompt_tokens: int | None = None  # keep this many of the prompt's last tokens; -1: what fits
    prompt_logprobs: int | None = None  # like logprobs, for the prompt's tokens; disables prefix cache hits
    detokenize: bool = True  # False: token ids only, text stays empty
    skip_special_tokens: bool = True  # leave tokens such as the end of sequence out of the text
    # what the output must match, such as a JSON schema; a dict of its fields works too
    structured_outputs: StructuredOutputsParams | None = None
    # functions called before each token, with (output token ids, logits) or (prompt token ids, output token
    # ids, logits), that return the logits to sample from: (V,) float32
    logits_processors: list[Callable[..., Any]] | None = None
    extra_args: dict[str, Any] | None = None  # of your own, for a `scheduler_cls`
    # what each output of `LLM.step` holds: everything so far, only what is new, or the final result
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    # Derived at construction, because every step reads them. A request's copy never changes.
    stop_strings: tuple[str, ...] = field(init=False, repr=False, compare=False)  # `stop` as a tuple
    edits_logits: bool = field(init=False, repr=False, compare=False)  # before temperature and filters
    penalizes: bool = field(init=False, repr=False, compare=False)  # tokens that occurred before
    biases_or_bans: bool = field(init=False, repr=False, compare=False)  # some tokens
    edits: Any = field(init=False, repr=False, compare=False, default=None)  # arrays of penalties.py, if made

    def __post_init__(self) -> None:
        """Validate every field. No value is clipped or ignored."""
        checked: dict[str, Any] = {}
        for table, check in ((INTEGERS, check_integer), (OPTIONAL, check_integer), (NUMBERS, check_number)):
            for name, limits in table.items():
                if (value := getattr(self, name)) is not None or table is not OPTIONAL:
                    checked[name] = check(name, value, *limits)
        self.stop = [self.stop] if isinstance(self.stop, str) else self.stop
        for name in ("stop", "stop_token_ids", "bad_words"):
            if getattr(self, name) is None:
                setattr(self, name, [])
        for name in ("allowed_token_ids", "forced_token_ids", "stop_token_ids"):
            if getattr(self, name) is not None:
                checked[name] = check_token_ids(name, getattr(self, name))
        for name in ("stop", "bad_words"):
            checked[name] = check_strings(name, getattr(self, name))
        for name in ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"):
            check_bool(name, getattr(self, name))
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be at least 1, or -1 for as many as fit, got 0")
        if (limit := self.max_tokens) is not None and self.min_tokens > limit:
            raise ValueError(f"min_tokens must be at most max_tokens={limit}, got {self.min_tokens}")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise TypeError(f"logit_bias must be a dict of token id to bias, got {self.logit_bias!r}")
            checked["logit_bias"] = {
                check_integer("logit_bias", token_id, 0): check_number("logit_bias", bias, -LARGEST, LARGEST)
                for token_id, bias in self.logit_bias.items()
            }
        if self.allowed_token_ids is not None and not checked["allowed_token_ids"]:
            raise ValueError("allowed_token_ids must not be empty, got []")
        if any(not word.strip() for word in checked["bad_words"]):
            raise ValueError(f"bad_words must not hold a blank string, got {self.bad_words!r}")
        if isinstance(given := self.structured_outputs, dict):
            if unknown := given.keys() - StructuredOutputsParams.__dataclass_fields__:
                raise TypeError(f"structured_outputs has no field {sorted(unknown, key=repr)[0]!r}")
            checked["structured_outputs"] = StructuredOutputsParams(**given)
        elif isinstance(given, StructuredOutputsParams):
            checked["structured_outputs"] = replace(given)
        elif given is not None:
            raise TypeError(f"structured_outputs must be StructuredOutputsParams or a dict, got {given!r}")
        if self.logits_processors is not None:
            checked["logits_processors"] = check_processors(self.logits_processors)
        checked["stop_strings"] = tuple(checked["stop"])
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True, got detokenize=False")
        if not (self.extra_args is None or isinstance(self.extra_args, dict)):
            raise TypeError(f"extra_args must be a dict, got {self.extra_args!r}")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise TypeError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}")
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        edits = self.logit_bias or self.allowed_token_ids or self.bad_words or self.min_tokens
        checked["penalizes"], checked["biases_or_bans"] = penalties != (0, 0, 1), bool(edits)
        checked["edits_logits"] = checked["penalizes"] or checked["biases_or_bans"]
        for name, value in checked.items():  # the values in plain types, and the derived fields
            setattr(self, name, value)

    def clone(self) -> "SamplingParams":
        """Return a copy. All fields are checked again: a bad one raises TypeError or ValueError."""
        return replace(self)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError if a token id is not in the vocabulary."""
        for name in ("logit_bias", "allowed_token_ids", "forced_token_ids", "stop_token_ids"):
            for token_id in getattr(self, name) or ():
                if not 0 <= token_id < vocab_size:
                    raise ValueError(f"{name} must hold token ids in [0, {vocab_size}), got {token_id}")
