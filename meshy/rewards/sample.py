"""What a reward function is given, and what becomes of its score. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SHOWN = 200  # characters of a text that a message shows


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    """One response: the prompt's chat messages, the response's text (special tokens left out), and the gold answer."""

    prompt: tuple[Mapping[str, Any], ...]
    response: str
    answer: Any
    finish_reason: str = "stop"
    info: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        """One line for messages: prompt, response and answer, shortened in the middle."""
        prompt = self.prompt[-1].get("content", "") if self.prompt else ""
        return f"prompt {_short(prompt)}, response {_short(self.response)}, answer {_short(self.answer)}"


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """A finite score; or None with the reason: the deadline (`timed_out`), or a reward that failed."""

    value: float | None
    error: str | None = None
    seconds: float = 0.0
    timed_out: bool = False


def to_score(value: Any) -> float:
    """A finite float from what a reward returned: a number, a bool, a numeric text, a numpy or torch scalar.

    Raises ValueError for everything else, None, NaN and infinities among it.
    """
    if isinstance(value, (bool, int, float, str)):
        plain: Any = value
    elif getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        plain = value.item()
    elif hasattr(type(value), "__float__") and getattr(value, "ndim", 0) == 0:
        plain = value
    else:
        raise ValueError(f"returned {_short(value)} ({type(value).__name__}); it must return one number")
    try:
        score = float(plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"returned {_short(value)} ({type(value).__name__}), which is no number: {error}") from error
    if not math.isfinite(score):
        raise ValueError(f"returned {score} ({type(value).__name__}); a score must be finite")
    return score


def _short(value: Any) -> str:
    text = repr(value)
    half = SHOWN // 2
    return text if len(text) <= SHOWN else f"{text[:half]} ... {text[-half:]}"
