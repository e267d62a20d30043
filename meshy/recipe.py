"""What a run is made of: service groups, rings and run-wide settings, typed and strict.

How a recipe file is read and set from the command line stands in `settings.py`. This module is pure: it imports
nothing heavy and does no I/O.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from meshy.colocation.columns import ring_declarations
from meshy.columns import TRAIN, Consumes, Produces
from meshy.contract import Declaration
from meshy.importing import nearest, path_of

ON_DEMAND: Literal["on_demand"] = "on_demand"
FALLBACK: Literal["fallback"] = "fallback"
Membership = Literal["on_demand", "fallback"]

Limit = tuple[bool, str, Any, str]
"""Whether a field's value is fine; the field, the value, and what is expected."""

MAY_BE_INFINITE = {"may_be_infinite": True}
"""Metadata of a number's field that takes infinity, too; every other must be finite."""


class RecipeError(ValueError):
    """A recipe that cannot run. `faults` holds every reason found, each saying what to change."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


def out_of_range(limits: Iterable[Limit]) -> list[str]:
    """A fault for each that does not hold."""
    return [f"{name}: expected {expected}, got {value}" for fine, name, value, expected in limits if not fine]


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """Base of every role's configuration. A role is one subclass of this and one subclass of `meshy.service.Service`.

    service: import path of the Service subclass; imported only in the service's own process.
    processes: `one` process a replica; `per_host`, one on each host that the replica spans; `per_gpu`, one a GPU.
    serves_http: the replica answers requests of other services on its endpoint port.
    ends_run: the run is over, in good order, when a process of this role ends in good order.
    can_restart: a replica may begin in the middle of a run.
    max_restarts: how often in a row a replica that dies is started again, waiting 1, 2, 4 ... 30 s before; ten minutes
        of being ready clear the count. 0: its death ends the run, as that of a replica of several processes does.
    """

    service: ClassVar[str] = ""
    processes: ClassVar[Literal["one", "per_host", "per_gpu"]] = "one"
    serves_http: ClassVar[bool] = False
    ends_run: ClassVar[bool] = False
    can_restart: ClassVar[bool] = True

    max_restarts: int = 0

    def consumes(self, recipe: Recipe) -> tuple[Consumes, ...]:
        """What the role reads from the queue."""
        return ()

    def produces(self, recipe: Recipe) -> tuple[Produces, ...]:
        """What the role writes to the queue."""
        return ()

    def live_rows(self, recipe: Recipe) -> dict[str, int]:
        """For each partition in which all replicas together create rows: how many can be alive at once, at most."""
        return {}

    def faults(self, recipe: Recipe) -> list[str]:
        """What is wrong with this configuration, without any I/O. Each sentence says what to change."""
        return []

    def preflight(self, recipe: Recipe) -> list[str]:
        """What is wrong as seen from the host on which the role will run, before anything is spawned (files, data)."""
        return []


@dataclass(frozen=True, kw_only=True)
class ServiceGroup:
    """`replicas` equal services of one role.

    gpus_per_replica: 0 for a role that computes on the CPU only.
    colocate_with: the group whose GPUs this one shares; both must be members of one ring.
    wait_for: groups that must be ready before this one starts its work.
    """

    id: str
    config: ServiceConfig
    replicas: int = 1
    gpus_per_replica: int = 0
    colocate_with: str | None = None
    wait_for: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ColocationRing:
    """Groups that take turns on exactly the same GPUs: ON_DEMAND members when they ask, in the order of the ring; the
    FALLBACK member, of which there is one, while nobody asks."""

    id: str
    members: tuple[tuple[str, Membership], ...]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the policy writes. Run-wide, since the trainer divides logits by the same temperature.

    top_k: -1 turns it off. stop, stop_token_ids: end a response beside the model's own end token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class QueueConfig:
    """TransferQueue's processes. storage_units: how many hold rows, spread over the hosts in turn."""

    storage_units: int = 1


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run.

    model: a folder in Hugging Face format, or a hub id. data: import path (or callable) of a factory that returns a
    `meshy.data.Task`, called with `data_options` and `seed`. steps: optimiser batches. deterministic: on CPU, equal
    seeds give equal tokens and losses, bit for bit. context_length: prompt and response together, in tokens.
    base_port: first of the ports that the run uses on every host; None picks a free block.
    """

    name: str = ""
    model: str
    data: str | Callable[..., Any]
    data_options: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[ServiceGroup, ...]
    rings: tuple[ColocationRing, ...] = ()
    steps: int = 100
    seed: int = 0
    deterministic: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    context_length: int = 1024
    queue: QueueConfig = field(default_factory=QueueConfig)
    base_port: int | None = None

    def group(self, id: str) -> ServiceGroup:
        """The group called `id`; KeyError with the nearest name where there is none."""
        for group in self.groups:
            if group.id == id:
                return group
        raise KeyError(f"no group {id!r} in the recipe{nearest(id, [g.id for g in self.groups])}")

    @property
    def batch_size(self) -> int:
        """Samples in one training batch: `batch_size` of the role that clears partition `train`."""
        size = getattr(self._trainer(), "batch_size", None)
        if not isinstance(size, int):
            raise LookupError("no role with a `batch_size` is the end consumer of partition 'train'")
        return size

    @property
    def max_staleness(self) -> int | None:
        """Versions that a token may be old when it is trained: `max_staleness` of that role; None for no bound."""
        return getattr(self._trainer(), "max_staleness", None)

    def _trainer(self) -> ServiceConfig | None:
        for group in self.groups:
            if any(c.partition == TRAIN and c.end for c in group.config.consumes(self)):
                return group.config
        return None

    def declarations(self) -> tuple[Declaration, ...]:
        """What every group says about the queue's columns, and the ledgers of the rings."""
        return tuple(
            Declaration(
                group=group.id,
                replicas=group.replicas,
                consumes=group.config.consumes(self),
                produces=group.config.produces(self),
                live_rows=group.config.live_rows(self),
            )
            for group in self.groups
        ) + tuple(
            declaration
            for ring in self.rings
            for declaration in ring_declarations(
                ring.id, {g.id: g.replicas for g in self.groups if g.id in dict(ring.members)}
            )
        )


def to_json(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe as plain JSON values; callables by their import path."""
    data = plain(recipe)
    for group, entry in zip(recipe.groups, data["groups"], strict=True):
        entry["config"]["type"] = f"{type(group.config).__module__}:{type(group.config).__qualname__}"
    return data


def plain(value: Any) -> Any:
    """A value of a recipe's field as JSON values. Raises ImportPathError for a callable that has no import path."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and math.isinf(value):
        return str(value)  # as the command line takes it; JSON has none
    return path_of(value) if callable(value) else value
