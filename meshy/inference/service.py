"""The inference service: an engine of the replica's, the embedded one or SGLang's server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from meshy.inference.choice import Choice, choose
from meshy.inference.config import InferenceConfig
from meshy.observe.runfolder import RunFolder, versions_in
from meshy.service.base import Service


class Replica(Protocol):
    """An engine that serves the replica's endpoint. Made on the main thread, and ready when it is made."""

    def wait(self) -> None:
        """Until the service is told to end; raises when the engine dies."""

    def close(self) -> None: ...

    def health(self) -> dict[str, Any]: ...

    def metrics(self) -> dict[str, float]: ...


class InferenceService(Service):
    """One replica, or one host's part of it. It serves the run's initial model as weight version 0, or, started again
    in a run that has gone on, the newest version that is on disk; then whatever it is told to load.
    """

    engine: Replica | None = None
    choice: Choice | None = None

    def setup(self) -> None:
        config: InferenceConfig = self.config
        self.choice = choose(config, self.device.type == "cuda")
        self.log.info("engine: %s (%s)", self.choice.engine, self.choice.why)
        if self.choice.engine == "embedded" and config.of_sglang:
            self.log.warning("the embedded engine knows nothing of %s: ignored", ", ".join(config.of_sglang))
        with self.gpu(), weights_at_start(self.context.folder, self.context.model_folder, self.context.name) as start:
            folder, version = start
            self.log.info("weight version %d, from %s", version, folder)
            if self.choice.engine == "sglang":
                from meshy.inference.sglang.replica import SglangReplica

                self.engine = SglangReplica(self, self.choice.python, folder, version)
            else:
                from meshy.inference.embedded.replica import EmbeddedReplica

                self.engine = EmbeddedReplica(self, folder, version)
            self.engine.start()

    def run(self) -> None:
        """Until the service is told to end; EngineFailure or SglangFailure when the engine dies."""
        assert self.engine is not None
        self.engine.wait()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()

    def health(self) -> dict[str, Any]:
        if self.choice is None:
            return {}
        told = {"engine": self.choice.engine, "engine_reason": self.choice.why}
        return told | (self.engine.health() if self.engine is not None else {})

    def metrics(self) -> dict[str, float]:
        return self.engine.metrics() if self.engine is not None else {}


@contextmanager
def weights_at_start(run: RunFolder, model_folder: Path, name: str) -> Iterator[tuple[Path, int]]:
    """The newest weight version that lies whole in the run folder; without any, the initial model as version 0.

    The trainer deletes old versions, and loading may take minutes: meanwhile the files have a second name, of service
    `name`.
    """
    held = run.weights / f".start-{name}"
    while versions := versions_in(run.weights):
        shutil.rmtree(held, ignore_errors=True)
        held.mkdir()
        try:
            for file in run.weights_of(versions[-1]).iterdir():
                os.link(file, held / file.name)
        except FileNotFoundError:
            continue  # it was deleted meanwhile, so there is a newer one
        try:
            yield held, versions[-1]
        finally:
            shutil.rmtree(held)
        return
    yield model_folder, 0
