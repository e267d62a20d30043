"""What the leader tells its crew beside the commands of the role."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Stop:
    """End `run`."""


@dataclass(frozen=True)
class EnterGpu:
    """The GPUs are here: go into the block that every rank stands before in `setup`."""


@dataclass(frozen=True)
class LeaveGpu:
    """Go on after that block."""


@dataclass(frozen=True)
class GoOn:
    """The leader has done what it does alone."""


@dataclass(frozen=True)
class FreeGpu:
    """Give up everything on this rank's GPU."""


@dataclass(frozen=True)
class RestoreGpu:
    """Bring it back. payload: what has travelled with the ring's token."""

    payload: Mapping[str, Any] = field(default_factory=dict)
