"""Groups that are there for the trainer, and which of them make up what is trained next. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshy.columns import ANY_BATCH
from meshy.queue.rows import Rows

# Small columns, one value a row, from which the leader decides who trains what.
LEADER_COLUMNS = (
    "group_id", "group_size", "position", "batch", "prompt_id", "n_tokens", "n_written", "oldest_version", "reward",
    "truncated", "lost", "t_sent", "t_generated", "t_rewarded",
)  # fmt: skip


class MisfitGroup(ValueError):
    """A group that no batch can be made of; the message says why."""


@dataclass
class Group:
    """The rows of one prompt that have come, with LEADER_COLUMNS of each, and what else the leader reads. ranks: who
    has been told to fetch it."""

    rows: list[Rows] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in LEADER_COLUMNS})

    @property
    def size(self) -> int:
        return len(self.columns["position"])

    @property
    def whole(self) -> bool:
        return self.size == self.columns["group_size"][0]

    @property
    def batch(self) -> int:
        return self.columns["batch"][0]

    @property
    def oldest_version(self) -> int:
        return min(self.columns["oldest_version"])


def rows_of(groups: Iterable[Group]) -> Rows:
    """The rows of all groups, which are at least one."""
    return Rows.concat([row for group in groups for row in group.rows])


class Inbox:
    """Whole groups, in the order in which they became whole. Rows of a group may come one by one, as scores are added
    to them by others.

    What is taken first is what would be too old first: groups by their oldest token, then in that order. A slow
    response, complete after many quick ones that were begun later, does not wait behind them until it must be dropped.
    """

    def __init__(self) -> None:
        self._open: dict[str, Group] = {}
        self.groups: dict[str, Group] = {}

    @property
    def samples(self) -> int:
        return sum(group.size for group in (*self._open.values(), *self.groups.values()))

    def add(self, rows: Rows, columns: Mapping[str, Sequence[Any]], ranks: Sequence[int]) -> None:
        """Rows with their LEADER_COLUMNS, and whatever more, as plain values, and the rank of each. MisfitGroup for one
        row more than its group has."""
        for i, name in enumerate(columns["group_id"]):
            if name in self.groups:
                raise MisfitGroup(
                    f"row {rows.uids[i]!r} came when all {self.groups[name].size} rows of its group {name!r} were "
                    "there; whoever writes rows must say in group_size how many a group has"
                )
            group = self._open.setdefault(name, Group())
            group.rows.append(rows.select([i]))
            group.ranks.append(ranks[i])
            for column, values in columns.items():
                group.columns.setdefault(column, []).append(values[i])
            if group.whole:
                self.groups[name] = self._open.pop(name)

    def have(self, batch: int) -> int:
        """Samples in whole groups that may be trained in this batch."""
        return sum(group.size for group in self._of(batch).values())

    def take(self, batch: int, samples: int) -> list[Group] | None:
        """Groups of so many samples for a batch, the oldest first; None while there are too few. MisfitGroup where
        whole groups do not add up to the number."""
        chosen: list[str] = []
        for name, group in sorted(self._of(batch).items(), key=lambda entry: entry[1].oldest_version):
            if samples <= 0:
                break
            samples -= group.size
            chosen.append(name)
        if samples > 0:
            return None
        if samples < 0:
            last = self.groups[chosen[-1]]
            raise MisfitGroup(
                f"group {chosen[-1]!r} has {last.size} samples, {-samples} more than are left to batch {batch} or its "
                "part; batch_size, and batch_size / mini_batches where they are streamed, must be whole groups"
            )
        return [self.groups.pop(name) for name in chosen]

    def drop_older(self, than: int) -> list[Group]:
        """Take out the groups that belong to no batch and hold a token of an older version."""
        names = [n for n, group in self.groups.items() if group.batch == ANY_BATCH and group.oldest_version < than]
        return [self.groups.pop(name) for name in names]

    def _of(self, batch: int) -> dict[str, Group]:
        return {name: group for name, group in self.groups.items() if group.batch in (batch, ANY_BATCH)}
