"""The sleeping trainer: the real collector, fetcher and gates round a step that only takes time."""

from __future__ import annotations

import time
from typing import Any

import torch

from meshy.generation.commands import Command
from meshy.generation.control import Control
from meshy.generation.transport import Transport
from meshy.observe.jsonl import JsonlWriter
from meshy.queue.rows import Rows
from meshy.service import Context, Service
from meshy.spmd.fetch import Fetcher
from meshy.training.batch import RANK_COLUMNS, Batch, joined, staleness
from meshy.training.collect import Collector
from meshy.training.gates import Gates
from meshy.training.inbox import Group, rows_of
from meshy.training.report import ages_row
from meshy.training.weights.background import Background
from scripts.bench.pace.roles import SleepingTrainerConfig

COMMAND_SECONDS = 30.0


class SleepingTrainer(Service):
    """One rank, which does what the trainer does, but computes nothing and publishes a number only.

    A line of metrics.jsonl for each version: `started` is when the gate before was put, `trained` when the last part of
    the batch was trained, `gate_put` when this version's gate was put, `ended` when that was done; unix seconds.
    """

    config: SleepingTrainerConfig

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.step = 0
        self.dropped = 0  # samples, since the run began
        self.collector: Collector | None = None

    def setup(self) -> None:
        urls = [url for id in self.config.publish_to for url in self.context.topology.urls(id)]
        self._background = Background("commands")
        self._transport = Transport()
        self._control = Control(urls, self._transport, COMMAND_SECONDS)
        self._metrics = JsonlWriter(self.context.folder.metrics)
        self.fetcher = Fetcher(self.queue, RANK_COLUMNS)
        self.gates = Gates(self.queue)

    def run(self) -> None:
        self.collector = Collector(self.queue, share=self._share, dropped=self._drop)
        put = self._open_gate(0)
        while self.step < self.recipe.steps and not self.stopping.is_set():
            put = self._one_step(put)
        self.gates.clear_all(lambda: None)

    def _share(self, rows: Rows, lengths: list[int]) -> list[int]:
        """On the collector's thread: read what has come, for it is all ours."""
        self.fetcher.want(rows)
        return [0] * len(rows)

    def _drop(self, groups: list[Group]) -> None:
        """Rollout may start as many others at once."""
        rows = rows_of(groups)
        self.fetcher.forget(rows.uids)
        self.queue.clear(rows)
        self.dropped += len(rows)
        self._open_gate(self.step)

    def _open_gate(self, version: int) -> float:
        """When it was put."""
        put = time.time()
        retired = version * self.config.batch_size + self.dropped
        self.gates.open(version, retired, stop=version == self.recipe.steps)
        return put

    def _one_step(self, started: float) -> float:
        """Version `self.step` becomes the next one. When its gate was put."""
        assert self.collector is not None
        step, dropped, waited = self.step + 1, self.dropped, 0.0
        ages = torch.zeros(step, dtype=torch.long)
        parts = []
        for samples in self.config.part_sizes:
            part = self.collector.collect(self.step, samples, self.config.max_staleness)
            waited += self.collector.waited
            ages += self._train(part)
            parts.append(part)
        trained, whole = time.time(), joined(parts)
        self.queue.clear(whole.rows)
        self._serve(step)
        put = self._open_gate(step)
        ended = time.time()
        self.step = step
        self.gates.clear_acknowledged()
        tokens = sum(whole.written)
        row: dict[str, Any] = {
            "step": step,
            "weight_version": step,
            "samples": len(whole.rows),
            "tokens": tokens,
            "parts": len(parts),
        }
        row |= {"lost": whole.lost, "dropped": self.dropped - dropped, **ages_row(ages.tolist())}
        row |= {"started": started, "trained": trained, "gate_put": put, "ended": ended, "step_seconds": put - started}
        self._metrics.write(row | {"time/train": tokens * self.config.token_seconds, "time/wait": waited})
        return put

    def _train(self, part: Batch) -> torch.Tensor:
        """Takes the time that the part's tokens take. Trained tokens by age, in versions; BadRows if one is too old."""
        data = self.fetcher.get(part.rows)
        self.fetcher.forget(part.rows.uids)
        ages = staleness(part.rows, data, self.step, self.config.max_staleness)
        begun = time.time()
        self.stopping.wait(sum(part.written) * self.config.token_seconds)
        self.timeline.record("train", begun, time.time())
        return torch.bincount(ages, minlength=self.step + 1)

    def _serve(self, version: int) -> None:
        """Every engine serves that version, from its next decode step on; nothing is interrupted."""
        body = {"new_version": str(version), "abort_all_requests": False}
        self._background.run(self._control.everywhere(Command("/update_weight_version", body)))

    def close(self) -> None:
        if self.collector is not None:
            self.collector.close()
        if hasattr(self, "gates"):
            self.fetcher.close()
            self._background.run(self._transport.close())
            self._background.close()
            self._metrics.close()

    def health(self) -> dict[str, Any]:
        return {"step": self.step, "steps": self.recipe.steps, "rows": self.collector.have if self.collector else 0}
