"""Roles that take turns on a ring, outside the package: they count, hold a lock, sleep, and die where they are told to.

The locks are the kernel's, on a file of the run folder for each GPU: they show two holders whatever the ring believes,
and go with the process that has them. Every event is written down with the machine's monotonic time.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from meshy.columns import UID, Consumes, Produces
from meshy.recipe import FALLBACK, ON_DEMAND, ColocationRing, Recipe, ServiceConfig, ServiceGroup
from meshy.service import Service

DONE = "done"


@dataclass(frozen=True, kw_only=True)
class TurnsConfig(ServiceConfig):
    """turns: how often it uses the GPUs. hold: seconds each time. restoring: seconds that a restore takes. crash: where
    it kills itself, once: "<before freeing | after freeing | after granting | in restore>"; at: in which turn. leaves:
    it ends when it has had its turns, and the others go on."""

    service: ClassVar[str] = "tests.colocation.roles:Turns"

    turns: int = 10
    hold: float = 0.0
    pause: float = 0.0
    restoring: float = 0.0
    crash: str = ""
    at: int = 3
    leaves: bool = False

    def produces(self, recipe: Recipe) -> tuple[Produces, ...]:
        first = next(g for g in recipe.groups if isinstance(g.config, TurnsConfig))
        return (Produces(DONE, (UID,), creates=True),) if first.config is self else ()


@dataclass(frozen=True, kw_only=True)
class IdleConfig(TurnsConfig):
    """The one that holds the GPUs while nobody asks."""

    service: ClassVar[str] = "tests.colocation.roles:Idle"


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(ServiceConfig):
    """Ends the run when every role has had its turns."""

    service: ClassVar[str] = "tests.colocation.roles:Judge"
    ends_run: ClassVar[bool] = True

    def consumes(self, recipe: Recipe) -> tuple[Consumes, ...]:
        return (Consumes(DONE, (UID,), end=True),)


class Turns(Service):
    config: TurnsConfig

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        folder = context.folder.path
        self.trace = (folder / f"trace-{context.name}.jsonl").open("a")
        self.marker = folder / f"crashed-{context.name}"
        self.locks = [(folder / f"lock-{gpu}").open("a") for gpu in context.replica.gpus]
        self.count = sum('"enter"' in line for line in (folder / f"trace-{context.name}.jsonl").open()) - 1
        self.granting = threading.Event()

    def note(self, event: str, **more: Any) -> None:
        self.trace.write(json.dumps({"event": event, "at": time.monotonic(), **more}) + "\n")
        self.trace.flush()

    def crash(self, where: str) -> None:
        if self.config.crash == where and self.count == self.config.at and not self.marker.exists():
            self.marker.touch()
            self.note("crash", where=where)
            os.kill(os.getpid(), signal.SIGKILL)

    def take(self) -> None:
        try:
            for lock in self.locks:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            (self.context.folder.path / "two-holders").write_text(self.context.name)
            raise RuntimeError("another one holds the lock") from None

    def setup(self) -> None:
        self.note("want")
        with self.gpu():
            self.take()
            self.note("enter")
            self.count += 1

    def free_gpu(self) -> None:
        self.note("free")
        self.granting.clear()
        self.crash("before freeing")
        for lock in self.locks:
            fcntl.flock(lock, fcntl.LOCK_UN)
        self.note("freed")

    def gpu_payload(self) -> dict[str, Any]:
        self.crash("after freeing")
        self.granting.set()
        return {self.context.group.id: self.count}

    def restore_gpu(self, payload: Mapping[str, Any]) -> None:
        self.note("restore", payload=dict(payload))
        self.take()
        threading.Event().wait(self.config.restoring)
        self.crash("in restore")
        self.note("restored")

    def run(self) -> None:
        while self.count < self.config.turns:
            self.note("want")
            with self.gpu():
                self.note("enter")
                self.count += 1
                threading.Event().wait(self.config.hold)
                self.note("leave")
            self.crash_after_granting()
            threading.Event().wait(self.config.pause)
        with (self.context.folder.path / f"done-{self.context.name}").open("w") as out:
            out.write(str(self.count))
        if not self.config.leaves:
            self.stopping.wait()

    def crash_after_granting(self) -> None:
        if self.config.crash == "after granting" and self.count == self.config.at and not self.marker.exists():
            assert self.ring is not None
            self.granting.wait()
            while self.ring.member.phase == "leaving":
                threading.Event().wait(0.001)
            self.crash("after granting")


class Idle(Turns):
    """Holds until somebody asks; its own code never does."""

    def run(self) -> None:
        while not self.stopping.wait(0.001 if self.config.crash else None):
            self.crash_after_granting()

    def restore_gpu(self, payload: Mapping[str, Any]) -> None:
        self.count += 1
        super().restore_gpu(payload)
        self.note("enter")


class Judge(Service):
    def run(self) -> None:
        folder = self.context.folder.path
        names = [
            replica.name
            for group in self.recipe.groups
            if group.config.service == TurnsConfig.service
            for replica in self.context.topology.replicas_of(group.id)
        ]
        while missing := [name for name in names if not (folder / f"done-{name}").exists()]:
            self.tell("ready", f"waiting for {missing}")
            threading.Event().wait(0.05)


def recipe(
    workers: int = 2, turns: int = 10, hold: float = 0.0, pause: float = 0.0, restoring: float = 0.0,
    crash: str = "", victim: str = "", at: int = 3, restarts: int = 5, replicas: int = 1,
    leaver: str = "",
) -> Recipe:  # fmt: skip
    """`idle` and so many workers on the same GPUs. victim: the group that crashes. leaver: the one that ends early."""

    def options(group: str) -> dict[str, Any]:
        told = {"turns": turns, "hold": hold, "pause": pause, "restoring": restoring, "max_restarts": restarts}
        if group == leaver:
            told |= {"leaves": True, "turns": 2}
        return told | ({"crash": crash, "at": at} if group == victim else {})

    names = [f"worker{i}" for i in range(workers)]
    return Recipe(
        name="ring",
        model="recipes/demo_model",
        data="nowhere:nothing",
        groups=(
            ServiceGroup(id="idle", config=IdleConfig(**options("idle")), replicas=replicas, gpus_per_replica=1),
            *(
                ServiceGroup(
                    id=name, config=TurnsConfig(**options(name)), gpus_per_replica=replicas, colocate_with="idle"
                )
                for name in names
            ),
            ServiceGroup(id="judge", config=JudgeConfig()),
        ),
        rings=(ColocationRing(id="shared", members=(("idle", FALLBACK), *((name, ON_DEMAND) for name in names))),),
    )
