"""Rows of a dataset, checked and made into examples. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshy.data.task import Example

ROLES = ("system", "user", "assistant", "tool")


class DatasetError(ValueError):
    """A dataset that cannot be trained on as it is; the message names the source and the first bad row."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row before it is checked; `where` names it in messages, such as `line 3`."""

    where: str
    messages: Any
    answer: Any
    info: Mapping[str, Any] = field(default_factory=dict)


def examples_from(rows: Iterable[Row], *, source: str, split: str) -> tuple[Example, ...]:
    """Examples with the ids `<split>-0`, `<split>-1` ... in the rows' order.

    DatasetError if there is no row, a null or empty answer, or a malformed prompt (how many, and the first of them).
    """
    examples, malformed = [], []
    for index, row in enumerate(rows):
        fault = message_fault(row.messages)
        if fault is not None:
            malformed.append(f"{row.where}: {fault}")
            continue
        if row.answer is None or (isinstance(row.answer, str) and not row.answer.strip()):
            raise DatasetError(
                f"{source}, {row.where}: the answer is {row.answer!r}, so no response could be graded; "
                "give it an answer or leave the row out"
            )
        messages = tuple(dict(message) for message in row.messages)
        examples.append(Example(id=f"{split}-{index}", messages=messages, answer=row.answer, info=row.info))
    if malformed:
        count = f"{len(malformed)} of {len(malformed) + len(examples)} {split} rows"
        raise DatasetError(f"{source}: {count} have malformed messages; the first is {malformed[0]}")
    if not examples:
        raise DatasetError(f"{source}: the {split} dataset is empty")
    return tuple(examples)


def message_fault(messages: Any) -> str | None:
    """What is wrong with a prompt's chat messages, or None."""
    if not isinstance(messages, (list, tuple)):
        return f"a list of messages is due, not {type(messages).__name__}: {messages!r:.200}"
    if not messages:
        return "the list of messages is empty"
    for message in messages:
        if not isinstance(message, Mapping):
            return f"a message is a {type(message).__name__}, not an object with 'role' and 'content': {message!r:.200}"
        if message.get("role") not in ROLES:
            return f"unknown role {message.get('role')!r} (known: {', '.join(ROLES)}): {message!r:.200}"
        if not isinstance(message.get("content"), str):
            return f"the content of a message is no text: {message!r:.200}"
    return None
