"""The sleeping trainer: the real queue, collector and gates round a step that only takes time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from meshy.generation.commands import Command
from meshy.generation.control import Control
from meshy.generation.transport import Transport
from meshy.observe.jsonl import JsonlWriter
from meshy.service import Service
from meshy.training.batch import RANK_COLUMNS, Batch, staleness
from meshy.training.collect import Collector
from meshy.training.gates import Gates
from meshy.training.weights.background import Background
from scripts.bench.pace.roles import SleepingTrainerConfig

COMMAND_SECONDS = 30.0


class SleepingTrainer(Service):
    """Writes a line of metrics.jsonl for each version; from `gate_put` to `ended` its gate was put (unix seconds)."""

    config: SleepingTrainerConfig

    def setup(self) -> None:
        urls = [url for id in self.config.publish_to for url in self.context.topology.urls(id)]
        self._background = Background("commands")
        self._transport = Transport()
        self._control = Control(urls, self._transport, COMMAND_SECONDS)
        self._metrics = JsonlWriter(self.context.folder.metrics)
        self.step = 0
        self.gates = Gates(self.queue)
        self.collector = Collector(self.queue, self.config.batch_size)

    def run(self) -> None:
        steps = self.recipe.steps
        self.gates.open(weight_version=0, samples_retired=0, stop=steps == 0)
        while self.step < steps:
            self._one_step(last=self.step + 1 == steps)
        self.gates.clear_all(lambda: None)

    def units(self) -> Iterator[Batch]:
        """What is trained at once, part after part, until a whole batch is trained."""
        yield self.collector.collect()

    def _one_step(self, last: bool) -> None:
        started, tokens, ages, parts = time.time(), 0, [0], []
        for part in self.units():
            data = self.queue.read(part.rows, RANK_COLUMNS)
            ages += staleness(part.rows, data, self.step, self.config.max_staleness).unique().tolist()
            begun = time.time()
            if self.stopping.wait(sum(part.written) * self.config.token_seconds):
                return
            self.timeline.record("train", begun, time.time())
            tokens += sum(part.written)
            parts.append(part)
        self.step += 1
        self._serve(self.step)
        put = time.time()
        self.gates.open(weight_version=self.step, samples_retired=self.step * self.config.batch_size, stop=last)
        ended = time.time()
        for part in parts:
            self.queue.clear(part.rows)
        self.gates.clear_acknowledged()
        samples = sum(len(part.rows) for part in parts)
        self._metrics.write(
            {"step": self.step, "weight_version": self.step, "samples": samples, "tokens": tokens, "parts": len(parts)}
            | {"staleness_max": max(ages), "started": started, "gate_put": put, "ended": ended}
            | {"step_seconds": ended - started, "time/train": tokens * self.config.token_seconds}
        )

    def _serve(self, version: int) -> None:
        """Every engine serves that version, from its next decode step on; nothing is interrupted."""
        body = {"new_version": str(version), "abort_all_requests": False}
        self._background.run(self._control.everywhere(Command("/update_weight_version", body)))

    def close(self) -> None:
        if hasattr(self, "_background"):
            self._background.run(self._transport.close())
            self._background.close()
            self._metrics.close()

    def health(self) -> dict[str, Any]:
        return {"step": getattr(self, "step", 0), "steps": self.recipe.steps}
