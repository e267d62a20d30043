"""The inference service: an engine of the replica's, the embedded one or SGLang's server."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from meshy.generation.expected import compare, read_expected
from meshy.inference.choice import Choice, choose
from meshy.inference.config import InferenceConfig
from meshy.inference.granted import GrantError, Weights, check_served, granted, there, to_load
from meshy.inference.parts import Parts
from meshy.observe.runfolder import RunFolder, versions_in
from meshy.service.base import Service


class Replica(Protocol):
    """An engine that serves the replica's endpoint. Made on the main thread, and answers once it is started.

    keeps_weights: whether weights that were freed can come back as they were.
    """

    @property
    def keeps_weights(self) -> bool: ...

    def start(self) -> None: ...

    def wait(self) -> None:
        """Until the service is told to end; raises when the engine dies."""

    def close(self) -> None: ...

    def version(self) -> str:
        """The weight version that it serves, also while freed."""

    def free(self) -> Parts:
        """Give up the memory of weights and cache. Requests in flight wait, as those do that come."""

    def restore(self, folder: Path | None, version: int | None) -> Parts:
        """Take it again and go on, with the weights in that folder as that version, or as they were. Raises where they
        cannot be loaded."""

    def checksums(self) -> list[dict[str, Any]]:
        """The `ranks` of `/weights_checker`, while it is not freed."""

    def health(self) -> dict[str, Any]: ...

    def metrics(self) -> dict[str, float]: ...


class InferenceService(Service):
    """One replica, or one host's part of it. It serves the run's initial model as weight version 0, or, started again
    in a run that has gone on, the newest version that is on disk; then whatever it is told to load.
    """

    engine: Replica | None = None
    choice: Choice | None = None
    _source: Weights  # what was loaded last

    def setup(self) -> None:
        config: InferenceConfig = self.config
        self.choice = choose(config, self.device.type == "cuda")
        self.log.info("engine: %s (%s)", self.choice.engine, self.choice.why)
        if self.choice.engine == "embedded" and config.of_sglang:
            self.log.warning("the embedded engine knows nothing of %s: ignored", ", ".join(config.of_sglang))
        with self.gpu(), self._weights_at_start() as (folder, version):
            self.log.info("weight version %d, from %s", version, folder)
            if self.choice.engine == "sglang":
                from meshy.inference.sglang.replica import SglangReplica

                self.engine = SglangReplica(self, self.choice.python, folder, version)
            else:
                from meshy.inference.embedded.replica import EmbeddedReplica

                self.engine = EmbeddedReplica(self, folder, version)
            self.engine.start()
            self._compare(self._source)

    @contextmanager
    def _weights_at_start(self) -> Iterator[tuple[Path, int]]:
        """What the ring's token names, else the newest on disk, else the initial model."""
        grant = granted(getattr(self.ring, "payload", {}))
        run, initial = self.context.folder, self.context.model_folder
        with weights_at_start(run, initial, self.context.name) as (folder, version):
            if grant is not None and (grant.folder.is_dir() or grant.version > version):
                self._source = there(grant)
                yield grant.folder, grant.version
            else:
                self._source = Weights(version, run.weights_of(version) if version else initial)
                yield folder, version

    def free_gpu(self) -> None:
        assert self.engine is not None
        start = time.time()
        parts = self.engine.free()
        end = time.time()
        self.timeline.record("free", start, end)
        self.log.info("the GPU is freed, in %.3f s: %s", end - start, parts)

    def restore_gpu(self, payload: Mapping[str, Any]) -> None:
        """On the weights that the payload names, or on newer ones that were served before. Raises GrantError."""
        assert self.engine is not None
        start = time.time()
        grant, served = granted(payload), self._served()
        load = to_load(grant, served, self._source, self.engine.keeps_weights)
        if grant is not None and grant.version < served:
            self.log.info("weights v%d are kept; the token grants v%d, which are older", served, grant.version)
        parts = self.engine.restore(None, None) if load is None else self.engine.restore(load.folder, load.version)
        if load is not None:
            self._source = load
        serves = self._served()
        check_served(grant, serves)
        if load is not None:
            self._compare(load)
        end = time.time()
        self.timeline.record("restore", start, end)
        self.log.info("the GPU is back, with weights v%d, in %.3f s: %s", serves, end - start, parts)

    def _compare(self, loaded: Weights) -> None:
        """With the checksums that the trainer has left beside these weights, if it has. Raises GrantError."""
        assert self.engine is not None
        expected = read_expected(loaded.folder, self.context.replica.url)
        if expected is None:
            return
        if wrong := compare(expected, self.engine.checksums()):
            told = ", ".join(wrong[:5]) + (" ..." if len(wrong) > 5 else "")
            raise GrantError(
                f"weights v{loaded.version}, as they were loaded from {loaded.folder}, are others than the trainer's, "
                f"by checksum: {len(wrong)} tensors, {told}"
            )
        self.log.info("weights v%d are the trainer's, by checksum", loaded.version)

    def _served(self) -> int:
        assert self.engine is not None
        version = self.engine.version()
        if not version.isdecimal():
            raise GrantError(f"the engine serves weights {version!r}, which is no version of this run")
        return int(version)

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
