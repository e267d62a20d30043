"""`Rows`: the handle of some rows. Small and picklable, so that one process may take rows and others read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rows:
    """Rows of one partition, in order.

    uids: each row's identity. indexes: where TransferQueue keeps it; meaningless without the uid.
    consumer: the name under which they were taken; None for rows that the holder has just put.
    """

    partition: str
    uids: tuple[str, ...]
    indexes: tuple[int, ...]
    consumer: str | None = None

    def __len__(self) -> int:
        return len(self.uids)

    def __iter__(self) -> Iterator[str]:
        """The uids."""
        return iter(self.uids)

    def select(self, positions: Sequence[int]) -> Rows:
        return Rows(
            self.partition,
            tuple(self.uids[i] for i in positions),
            tuple(self.indexes[i] for i in positions),
            self.consumer,
        )

    @staticmethod
    def concat(parts: Iterable[Rows]) -> Rows:
        """One handle for all. The parts must be of one partition and one consumer, and at least one."""
        parts = tuple(parts)
        kinds = {(rows.partition, rows.consumer) for rows in parts}
        if len(kinds) != 1:
            raise ValueError(
                f"Rows.concat needs rows of one partition and one consumer, but got {sorted(map(str, kinds))}"
            )
        ((partition, consumer),) = kinds
        uids = tuple(uid for rows in parts for uid in rows.uids)
        return Rows(partition, uids, tuple(index for rows in parts for index in rows.indexes), consumer)
