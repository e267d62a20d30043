"""What a reward function is given. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    """One response: the prompt's chat messages, the response's text (special tokens left out), and the gold answer."""

    prompt: tuple[Mapping[str, Any], ...]
    response: str
    answer: Any
    finish_reason: str = "stop"
    info: Mapping[str, Any] = field(default_factory=dict)
