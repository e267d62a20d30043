"""Roles of a user: outside the package, a config and a Service each. Rows go writer -> scorer -> reader."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import ClassVar

from meshy.columns import TOKENS, UID, Column, Consumes, Produces
from meshy.lifetime import former_lives
from meshy.recipe import Recipe, ServiceConfig, ServiceGroup
from meshy.service import Service

LENGTH = Column("length", "float32")
ROWS = 12


@dataclass(frozen=True, kw_only=True)
class WriterConfig(ServiceConfig):
    service: ClassVar[str] = "tests.ignitor.roles:Writer"

    def produces(self, recipe: Recipe) -> tuple[Produces, ...]:
        return (Produces("train", (UID, TOKENS), creates=True),)


@dataclass(frozen=True, kw_only=True)
class ScorerConfig(ServiceConfig):
    """dies: by SIGKILL in its first life, with rows in its hands."""

    service: ClassVar[str] = "tests.ignitor.roles:Scorer"
    dies: bool = False

    def consumes(self, recipe: Recipe) -> tuple[Consumes, ...]:
        return (Consumes("train", (TOKENS,)),)

    def produces(self, recipe: Recipe) -> tuple[Produces, ...]:
        return (Produces("train", (LENGTH,)),)


@dataclass(frozen=True, kw_only=True)
class ReaderConfig(ServiceConfig):
    """after: what the reader does once it has read all rows."""

    service: ClassVar[str] = "tests.ignitor.roles:Reader"
    ends_run: ClassVar[bool] = True
    after: str = "end"

    def consumes(self, recipe: Recipe) -> tuple[Consumes, ...]:
        return (Consumes("train", (UID, TOKENS, LENGTH), end=True),)

    def preflight(self, recipe: Recipe) -> list[str]:
        if self.after == "slow":
            print("looking at the data", flush=True)
            threading.Event().wait(60)
        return ["after: expected something else than 'refuse'"] if self.after == "refuse" else []


class Writer(Service):
    def run(self) -> None:
        uids = [str(i) for i in range(ROWS)]
        self.queue.put("train", {"uid": uids, "tokens": [list(range(i + 1)) for i in range(ROWS)]})
        self.stopping.wait()


class Scorer(Service):
    def run(self) -> None:
        scored = 0
        while scored < ROWS:
            rows = self.queue.take("train", timeout=60)
            if self.config.dies and not former_lives():
                os.kill(os.getpid(), signal.SIGKILL)
            tokens = self.queue.read(rows, ["tokens"])["tokens"]
            self.queue.write(rows, {"length": [float(len(row)) for row in tokens]})
            scored += len(rows)
        self.stopping.wait()


class Reader(Service):
    """Starts a grandchild too, to see that it does not outlive the run."""

    def setup(self) -> None:
        if self.config.after == "refuse to start":
            raise ValueError("the reader does not start")

    def run(self) -> None:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        seen: list[float] = []
        while len(seen) < ROWS:
            rows = self.queue.take("train", timeout=60)
            seen += self.queue.read(rows, ["length"])["length"].tolist()  # type: ignore[union-attr]
            self.queue.clear(rows)
        (self.context.folder.path / "seen.txt").write_text(str(sorted(seen)))
        if self.config.after == "raise":
            raise ValueError("the reader has had enough")
        if self.config.after == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            threading.Event().wait()
        if self.config.after == "stay":
            self.stopping.wait()
        if self.config.after == "exit":
            os._exit(7)


def recipe(after: str = "end", model: str = "recipes/demo_model", on_gpu: bool = False) -> Recipe:
    return Recipe(
        name="roles",
        model=model,
        data="nowhere:nothing",
        groups=(
            ServiceGroup(id="writer", config=WriterConfig(), gpus_per_replica=1),
            ServiceGroup(id="scorer", config=ScorerConfig(), wait_for=("writer",)),
            ServiceGroup(
                id="reader", config=ReaderConfig(after=after), gpus_per_replica=1 if on_gpu else 0, wait_for=("scorer",)
            ),
        ),
    )
