"""The inference service: the embedded engine in a process of the run."""

from __future__ import annotations

from typing import Any

from meshy.inference.config import InferenceConfig
from meshy.inference.embedded.launch import EmbeddedOptions, EmbeddedServer
from meshy.service.base import Service


class InferenceService(Service):
    """One replica. It serves weight version 0, the run's initial model, until it is told to load another."""

    server: EmbeddedServer | None = None

    def setup(self) -> None:
        config: InferenceConfig = self.config
        replica, recipe = self.context.replica, self.recipe
        options = EmbeddedOptions(
            model_path=self.context.model_folder,
            host=replica.host,
            port=replica.endpoint_port,
            device=str(self.device),
            dtype=config.dtype,
            max_running_requests=config.max_running_requests,
            context_length=config.context_length or recipe.context_length,
            weight_version="0",
            random_seed=recipe.seed + replica.index if recipe.deterministic else None,
            threads=config.threads or (1 if recipe.deterministic else None),
        )
        with self.gpu():
            self.server = EmbeddedServer(options, on_busy=lambda start, end: self.timeline.record("decode", start, end))
        self.server.start()
        self.log.info("embedded engine on %s, %s, at %s", options.device, options.dtype, replica.url)

    def run(self) -> None:
        """Until the service is told to end; EngineFailure when the engine dies."""
        assert self.server is not None
        self.server.wait()

    def close(self) -> None:
        if self.server is not None:
            self.server.close()

    def health(self) -> dict[str, Any]:
        if self.server is None:
            return {}
        engine = self.server.engine
        return {
            "engine": "embedded",
            "weight_version": engine.weight_version,
            "paused": engine.paused,
            "running": len(engine.scheduler.running),
            "queued": len(engine.scheduler.waiting),
        }

    def metrics(self) -> dict[str, float]:
        if self.server is None:
            return {}
        engine = self.server.engine
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
