"""The embedded engine as the engine of a replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshy.inference.config import InferenceConfig
from meshy.inference.embedded.launch import EmbeddedOptions, EmbeddedServer
from meshy.inference.parts import Parts
from meshy.service.base import Service


class EmbeddedReplica:
    """Takes the replica's port and loads the model when it is made; answers from `start` on."""

    keeps_weights = True

    def __init__(self, service: Service, folder: Path, version: int) -> None:
        config: InferenceConfig = service.config
        replica, recipe = service.context.replica, service.recipe
        options = EmbeddedOptions(
            model_path=folder,
            host=replica.host,
            port=replica.endpoint_port,
            device=str(service.device),
            dtype=config.dtype,
            max_running_requests=config.max_running_requests,
            context_length=config.context_length or recipe.context_length,
            weight_version=str(version),
            random_seed=recipe.seed + replica.index if recipe.deterministic else None,
            threads=config.threads or (1 if recipe.deterministic else None),
        )
        self._server = EmbeddedServer(options, on_busy=lambda start, end: service.timeline.record("decode", start, end))
        service.log.info("embedded engine on %s, %s, at %s", options.device, options.dtype, replica.url)

    def start(self) -> None:
        self._server.start()

    def wait(self) -> None:
        self._server.wait()

    def close(self) -> None:
        self._server.close()

    def version(self) -> str:
        return self._server.engine.weight_version

    def free(self) -> Parts:
        return self._server.free()

    def restore(self, folder: Path | None, version: int | None) -> Parts:
        return self._server.restore(folder, version)

    def checksums(self) -> list[dict[str, Any]]:
        engine = self._server.engine
        return [{"checksums": engine.call(engine.runner.checksums).result()}]

    def health(self) -> dict[str, Any]:
        engine = self._server.engine
        return {
            "weight_version": engine.weight_version,
            "paused": engine.paused,
            "freed": engine.freed,
            "running": len(engine.scheduler.running),
            "queued": len(engine.scheduler.waiting),
        }

    def metrics(self) -> dict[str, float]:
        engine = self._server.engine
        counters = engine.counters
        return {
            "generated_tokens": counters.generated_tokens,
            "finished_requests": counters.finished_requests,
            "busy_seconds": counters.busy_seconds,
            "tokens_per_busy_second": counters.generated_tokens / counters.busy_seconds if counters.busy_seconds else 0,
            "running": len(engine.scheduler.running),
            "queued": len(engine.scheduler.waiting),
            "weight_version": float(engine.weight_version) if engine.weight_version.isdecimal() else -1.0,
        }
