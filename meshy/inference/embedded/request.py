"""One generation: what was asked, what has been written so far, and why it ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64

DEFAULT_MAX_NEW_TOKENS = 128

# Fields of SGLang's sampling parameters that this engine does not implement, with the value that means "off".
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_new_tokens": (0,),
    "logit_bias": (None, {}),
    "regex": (None,),
    "json_schema": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stop_regex": (None, "", []),
    "custom_params": (None,),
}
_IGNORED = {"n", "spaces_between_special_tokens", "stream_interval"}


class RequestError(ValueError):
    """A request that cannot be served as asked; the server answers 400 with this message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw tokens, with SGLang's names, defaults and limits. `temperature=0` is greedy; `top_k=-1` is off."""

    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature must be a non-negative finite number, got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}.")
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p must be in [0, 1], got {self.min_p}.")
        if self.top_k < -1 or self.top_k == 0:
            raise RequestError(f"top_k must be -1 (disable) or at least 1, got {self.top_k}.")
        if self.max_new_tokens is not None and self.max_new_tokens < 0:
            raise RequestError(f"max_new_tokens must be at least 0, got {self.max_new_tokens}.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def filtered(self) -> bool:
        """Whether some tokens are excluded before drawing."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> SamplingParams:
        """From the JSON object `sampling_params`. Raises RequestError for a wrong type, range, or unsupported field."""
        given = {name: value for name, value in fields.items() if name not in _IGNORED}
        for name, off in _UNSUPPORTED.items():
            if name in given and given.pop(name) not in off:
                raise RequestError(f"The embedded engine does not support the sampling parameter {name!r}.")
        try:
            params = _convert(given)
        except (TypeError, ValueError) as error:
            raise RequestError(f"Invalid sampling_params: {error}") from error
        if given:
            raise RequestError(f"Unknown sampling parameter {sorted(given)[0]!r}.")
        return cls(**params)


def _convert(given: dict[str, Any]) -> dict[str, Any]:
    """Take the known fields out of `given`, each as its Python type; a null is the default."""
    readers: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "max_new_tokens": ("max_new_tokens", int),
        "temperature": ("temperature", float),
        "top_p": ("top_p", float),
        "top_k": ("top_k", int),
        "min_p": ("min_p", float),
        "stop": ("stop", lambda value: (value,) if isinstance(value, str) else tuple(map(str, value))),
        "stop_token_ids": ("stop_token_ids", lambda value: frozenset(map(int, value))),
        "ignore_eos": ("ignore_eos", bool),
        "skip_special_tokens": ("skip_special_tokens", bool),
        "no_stop_trim": ("no_stop_trim", bool),
        "sampling_seed": ("seed", int),
    }
    params: dict[str, Any] = {}
    for key, (name, read) in readers.items():
        value = given.pop(key, None)
        if value is not None:
            params[name] = read(value)
    return params


def integer(value: Any, name: str, *, default: int, at_least: int) -> int:
    """A whole number of a request; null is the default. Raises RequestError."""
    if value is None:
        return default
    if type(value) is not int or value < at_least:
        raise RequestError(f"{name} must be a whole number of at least {at_least}, got {value!r}.")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobOptions:
    """Which log-probs the answer carries. `start` is the first prompt position to score, None for none of them."""

    wanted: bool = False
    start: int | None = None
    top: int = 0
    token_ids: tuple[int, ...] = ()
    with_text: bool = False


class Scored(NamedTuple):
    """Log-probs of some tokens at one place."""

    logprobs: Float32[np.ndarray, " k"]
    ids: Int64[np.ndarray, " k"]

    def pairs(self) -> Iterator[tuple[float, int]]:
        return zip(self.logprobs.tolist(), self.ids.tolist(), strict=True)


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """A generation on its way. The engine's thread appends; other threads only read (lists never shrink)."""

    rid: str
    prompt: list[int]
    params: SamplingParams
    max_new_tokens: int
    seed: int
    stop_ids: frozenset[int]
    find_stop: Callable[[Sequence[int]], str | None] | None = None
    logprob_options: LogprobOptions = LogprobOptions()
    sink: Any = None
    stream: bool = False

    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)  # [version, start, end]
    output_top: list[Scored] = field(default_factory=list)
    output_ids_logprobs: list[Scored] = field(default_factory=list)
    input_logprobs: list[float | None] | None = None
    input_top: list[Scored | None] = field(default_factory=list)
    input_ids_logprobs: list[Scored | None] = field(default_factory=list)
    version: str | None = None  # of the weights that were used last
    finish_reason: dict[str, Any] | None = None
    retractions: int = 0
    received: float = field(default_factory=time.time)
    first_scheduled: float | None = None
    first_token: float | None = None
    finished_at: float | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def last_token(self) -> int:
        return self.output[-1] if self.output else self.prompt[-1]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def scores_input(self) -> bool:
        """Whether the next prefill must also score the prompt."""
        return self.logprob_options.start is not None and self.input_logprobs is None

    def append(self, token: int, logprob: float, version: str) -> None:
        """Add one sampled token written by weight `version`, and decide whether it is the last.

        A request for no token at all (its prompt is only scored) ends without it.
        """
        self.version = version
        if self.max_new_tokens == 0:
            self.finish({"type": "length", "length": 0})
            return
        output = self.output
        output.append(token)
        self.logprobs.append(logprob)
        count = len(output)
        spans = self.spans
        if spans and spans[-1][0] == version:
            spans[-1][2] = count
        else:
            spans.append([version, count - 1, count])
        if token in self.stop_ids:
            self.finish({"type": "stop", "matched": token})
        elif self.find_stop is not None and (matched := self.find_stop(output)) is not None:
            self.finish({"type": "stop", "matched": matched})
        elif count >= self.max_new_tokens:
            self.finish({"type": "length", "length": self.max_new_tokens})

    def finish(self, reason: dict[str, Any]) -> None:
        self.finished_at = time.time()
        self.finish_reason = reason
