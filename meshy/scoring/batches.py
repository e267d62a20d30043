"""Rows that were scored, until a whole batch of them is there to be learnt from. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshy.columns import ANY_BATCH


@dataclass(frozen=True)
class Whole:
    """A batch in the order of the data. ranks: who has scored each row. columns: numbers of each."""

    uids: tuple[str, ...]
    ranks: tuple[int, ...]
    columns: Mapping[str, list[Any]]


class Batches:
    """size: rows of a batch. Rows that say for which batch they are wait for that one; the others make one up in the
    order in which they came."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: dict[int, list[tuple[str, int, dict[str, Any]]]] = {}

    @property
    def rows(self) -> int:
        return sum(len(rows) for rows in self._waiting.values())

    def add(self, uids: Sequence[str], ranks: Sequence[int], columns: Mapping[str, Sequence[Any]]) -> list[Whole]:
        """columns: `position` and `batch` of each row, and others. Returns the batches that are whole now."""
        for i, uid in enumerate(uids):
            numbers = {name: values[i] for name, values in columns.items()}
            self._waiting.setdefault(numbers["batch"], []).append((uid, ranks[i], numbers))
        whole = []
        for batch in sorted(self._waiting, key=lambda batch: (batch == ANY_BATCH, batch)):
            rows = self._waiting[batch]
            while len(rows) >= self._size:
                whole.append(_whole(rows[: self._size]))
                del rows[: self._size]
            if not rows:
                del self._waiting[batch]
        return whole


def _whole(rows: Sequence[tuple[str, int, dict[str, Any]]]) -> Whole:
    rows = sorted(rows, key=lambda row: (row[2]["position"], len(row[0]), row[0]))
    return Whole(
        uids=tuple(uid for uid, _, _ in rows),
        ranks=tuple(rank for _, rank, _ in rows),
        columns={name: [numbers[name] for _, _, numbers in rows] for name in rows[0][2]},
    )
