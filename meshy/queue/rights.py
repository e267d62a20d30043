"""What a caller may do by the contract: which columns it writes, under which names it consumes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from meshy.columns import Contract, PartitionContract
from meshy.importing import nearest
from meshy.queue.errors import UnknownName


class Rights:
    """caller: `<group>.<replica>`, such as `trainer.0`."""

    def __init__(self, contract: Contract, caller: str) -> None:
        group, _, replica = caller.rpartition(".")
        if not group or not replica.isdecimal():
            raise UnknownName(f"a queue caller is called '<group>.<replica>', such as 'trainer.0', but got {caller!r}")
        self.contract = contract
        self.caller = caller
        self.group = group
        self.replica = replica

    def partition(self, name: str) -> PartitionContract:
        if name not in self.contract.partitions:
            self._unknown("the queue has no partition", name, self.contract.partitions)
        return self.contract.partitions[name]

    def check_readable(self, partition: str, columns: Iterable[str]) -> None:
        known = self.partition(partition).columns
        for column in columns:
            if column not in known:
                self._unknown(f"partition {partition!r} has no column", column, known)

    def check_writable(self, partition: str, columns: Iterable[str]) -> None:
        """Raise unless the caller's group declared that it produces these columns."""
        columns = tuple(columns)
        self.check_readable(partition, columns)
        mine = self.partition(partition).writers.get(self.group, ())
        for column in columns:
            if column not in mine:
                self._unknown(f"{self.group!r} does not declare that it produces {partition}", column, mine)

    def consumer(self, partition: str, name: str | None = None) -> str:
        """The caller's consumer in a partition: its only one, or `name` (`<name>.<replica>` where each has its own).

        Raises UnknownName if there is none, or if there are several and `name` does not say which.
        """
        consumers = [c.name for c in self.partition(partition).consumers.values() if c.group == self.group]
        others = [c for c in consumers if c.rpartition(".")[2].isdecimal() and not c.endswith(f".{self.replica}")]
        mine = [c for c in consumers if c not in others]
        if name is None and len(mine) == 1:
            return mine[0]
        if name is None:
            what = f"is no consumer of partition {partition!r}" if not mine else f"consumes {partition!r} under {mine}"
            raise UnknownName(f"{self.caller} {what}; " + ("name one" if mine else "declare it in its consumes()"))
        found = next((c for c in mine if c in (name, f"{name}.{self.replica}")), None)
        if found is None:
            self._unknown(f"in partition {partition!r} {self.caller} has no consumer", name, mine)
        return found

    def _unknown(self, what: str, name: str, known: Iterable[str]) -> NoReturn:
        known = sorted(known)
        have = f"; it may be {', '.join(known)}" if known else ""
        raise UnknownName(f"{self.caller}: {what} {name!r}{nearest(name, known)}{have}")
