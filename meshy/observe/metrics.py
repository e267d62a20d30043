"""The numbers of each step and evaluation: JSON lines and TensorBoard events, written by trainer rank 0."""

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from meshy.observe.jsonl import JsonlWriter
from meshy.observe.runfolder import RunFolder

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

STEP_FIELDS = (
    "step",
    "weight_version",
    "reward_mean",
    "reward_std",
    "response_length_mean",
    "staleness_max",
    "loss",
    "grad_norm",
    "entropy",
    "lr",
    "mismatch_kl",
    "samples",
    "tokens",
    "step_seconds",
    "tokens_per_second",
    "started",
    "ended",
)
"""What each line of metrics.jsonl holds; besides, `time/<part>` seconds for each of TIME_PARTS.

`step` counts from 1. `started` and `ended` are unix seconds; `step_seconds` is their difference.
"""

TIME_PARTS = ("generate", "reward", "queue", "train", "publish", "wait")

CLOCKS = ("step", "started", "ended")
"""Fields that say when, not how well: no curves of their own in TensorBoard."""


class MetricsWriter:
    """Writes metrics.jsonl, evals.jsonl and TensorBoard events of one run.

    NaN and infinities become null in the files, are left out of TensorBoard, and are warned of once by name.

    Example:
        with MetricsWriter(RunFolder(run_dir)) as metrics:
            metrics.step({"step": 1, "reward_mean": 0.4, "time/train": 1.2, ...})
            metrics.evaluation({"weight_version": 0, "accuracy": 0.52, "count": 256, "seconds": 3.1})
    """

    def __init__(self, folder: RunFolder) -> None:
        self._steps = JsonlWriter(folder.metrics)
        self._evals = JsonlWriter(folder.evals)
        self._events_path = folder.tensorboard
        self._events: SummaryWriter | None = None

    def step(self, row: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl. `row` has an int `step`; the rest is named in STEP_FIELDS, more is welcome."""
        self._steps.write(row)
        scalars = {name if "/" in name else f"train/{name}": row[name] for name in row if name not in CLOCKS}
        self._add_scalars(scalars, row["step"])

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """One line of evals.jsonl. `row` has an int `weight_version`, `accuracy` (0..1), `count` and `seconds`."""
        stamped = {"time": time.time(), **row}
        self._evals.write(stamped)
        self._add_scalars({f"eval/{name}": value for name, value in row.items()}, row["weight_version"])

    def _add_scalars(self, values: Mapping[str, Any], position: int) -> None:
        if self._events is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._events = SummaryWriter(str(self._events_path), flush_secs=5)
        for name, value in values.items():
            number = value.tolist() if hasattr(value, "tolist") else value
            if isinstance(number, int | float) and math.isfinite(number):
                self._events.add_scalar(name, number, position)

    def close(self) -> None:
        self._steps.close()
        self._evals.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
