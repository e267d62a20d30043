"""What can go wrong at the queue. Every error names the call, the process or the row, and what to do. Pure."""

from __future__ import annotations


class QueueError(RuntimeError):
    """Base of everything that the queue refuses or fails to do."""


class QueueTimeout(QueueError, TimeoutError):
    """`take` waited as long as it was told to; the message says which columns were missing."""


class QueueUnreachable(QueueError):
    """A process of the queue did not answer within the deadline."""


class QueueClosed(QueueError):
    """The client was closed while, or before, the call ran."""


class WrongRun(QueueError):
    """The process at this address serves another run, or is another process of this one."""


class QueueFull(QueueError):
    """The put would exceed the partition's bound on live rows. Nothing was written."""


class DuplicateUid(QueueError):
    """A row with this uid is alive already. Nothing was written."""


class StaleRows(QueueError):
    """The rows were cleared (and perhaps reused) since the handle was made. Nothing was read or written."""


class MissingColumn(QueueError):
    """A column was read that has not been written into these rows."""


class ColumnError(QueueError, ValueError):
    """Values that do not fit the declared column: dtype, kind or length. Nothing was written."""


class UnknownName(QueueError, ValueError):
    """A partition, column or consumer that the contract does not have, or that is not this caller's."""


class Refused(QueueError):
    """A call that this caller may not make, such as a clear by somebody who is not the end consumer."""


def banished(sender: str) -> Refused:
    """What every process of the queue answers to a client that was banished."""
    return Refused(f"{sender} was declared dead; nothing that it asks for is done any more")


ERRORS: tuple[type[QueueError], ...] = (
    QueueTimeout,
    QueueUnreachable,
    QueueClosed,
    WrongRun,
    QueueFull,
    DuplicateUid,
    StaleRows,
    MissingColumn,
    ColumnError,
    UnknownName,
    Refused,
)
BY_NAME = {error.__name__: error for error in ERRORS}
"""How errors travel: a server answers with the class's name and the message."""
