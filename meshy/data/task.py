"""What a run learns: prompts to train on, prompts that it never trains on, and a reward. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt: chat messages (`role`, `content`), and the answer that a reward compares with.

    id: unique within its task. info: whatever else the reward wants to know.
    """

    id: str
    messages: tuple[Mapping[str, Any], ...]
    answer: Any
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task:
    """`train` and `evaluation` share no example; `reward` is an import path or a callable (see `meshy.rewards`).

    ValueError if two examples have one id.
    """

    name: str
    train: Sequence[Example]
    evaluation: Sequence[Example]
    reward: str | Callable[..., Any]

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for split, examples in (("train", self.train), ("evaluation", self.evaluation)):
            for row, example in enumerate(examples):
                place = f"{split} row {row}"
                if isinstance(example, Example) and seen.setdefault(example.id, place) != place:
                    raise ValueError(
                        f"task {self.name!r}: {seen[example.id]} and {place} both have the id {example.id!r}; "
                        "make them unique"
                    )
