"""The columns of a ring's ledger, partition `colocate.<ring>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshy.columns import UID, Column, Consumes, Produces
from meshy.contract import Declaration

REQUEST = (
    UID,
    Column("replica", "str", doc="who asks"),
    Column("life", "str", doc="of its process; a replica that starts again has another one"),
    Column("asked", "float64", doc="unix seconds"),
)
GRANT = (
    Column("turn", "int64", doc="1, 2, 3 ... without a gap"),
    Column("leads", "bool", doc="the row's replica grants the next turn"),
    Column("source", "str", doc="who granted it"),
    Column("reason", "str"),
    Column("granted", "float64", doc="unix seconds"),
    Column("payload", "str", doc="JSON; travels with the token, such as the weights to serve"),
)
PRESSES = Column("presses", "bool", doc="code waits for the GPUs; said of FALLBACK's rows")
FREED = Column("freed", "bool", doc="the row's replica has left the turn and its GPUs")

SPARE_ROWS = 8


def partition_of(ring: str) -> str:
    return f"colocate.{ring}"


def keeper_of(ring: str) -> str:
    """The keeper's name as a caller of the queue."""
    return f"keeper-{ring}.0"


def ring_declarations(ring: str, replicas: Mapping[str, int]) -> Sequence[Declaration]:
    """Who writes and clears the ledger. replicas: of each member, by group. A replica has at most one row that waits
    and one of the present turn; the keeper clears all others."""
    partition = partition_of(ring)

    asks = Produces(partition, REQUEST, creates=True, shared=True)
    grants = Produces(partition, (*GRANT, PRESSES, FREED), shared=True)
    keeper = keeper_of(ring).rpartition(".")[0]
    return (
        *(Declaration(group, count, (), (asks, grants), {partition: 3 * count}) for group, count in replicas.items()),
        Declaration(keeper, 1, (Consumes(partition, ("uid",), end=True),), (grants,), {partition: SPARE_ROWS}),
    )
