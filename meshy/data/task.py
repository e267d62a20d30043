"""What a run learns: prompts to train on, prompts that it never trains on, and a reward. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt: chat messages (`role`, `content`), and the answer that a reward compares with."""

    id: str
    messages: tuple[Mapping[str, Any], ...]
    answer: Any
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task:
    """`train` and `evaluation` share no example; `reward` is an import path or a callable (see `meshy.rewards`)."""

    name: str
    train: Sequence[Example]
    evaluation: Sequence[Example]
    reward: str | Callable[..., Any]
