"""The columns of `train` that a recipe has the trainer wait for beside those that rollout always writes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshy.columns import PER_TOKEN, Column, PartitionContract


@dataclass(frozen=True)
class Further:
    """numbers: one a sample, read by the leader. tokens: one or several a token, read by the rank that trains the row.
    optional: those that only some rows have (see `Produces.route`)."""

    numbers: tuple[str, ...] = ()
    tokens: Mapping[str, Column] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()

    @classmethod
    def of(cls, names: Sequence[str], contract: PartitionContract) -> Further:
        """names: of the columns; others than numbers are waited for and not read."""
        columns = [contract.columns[name] for name in names]
        return cls(
            numbers=tuple(c.name for c in columns if c.kind == "scalar" and c.dtype not in ("str", "object")),
            tokens={c.name: c for c in columns if c.kind in PER_TOKEN and c.dtype not in ("str", "object")},
            optional=frozenset(names).intersection(contract.end_consumer.routed),
        )
