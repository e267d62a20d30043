"""What the paces reach in real processes, over what they could reach at best.

    python -m scripts.bench.pace.measure [--small-only] [--keep FOLDER]     (make bench-async)

Real ignitor, queue, gates, pacing and rollout between engines and a trainer that sleep; one engine of 32 slots and
batches of 128 samples, then 16 engines and batches of 2048; response lengths log-normal (sigma 1, mean
200 tokens), the same ones as in the simulation (`pace/bound.py`); a batch is trained in the time in which the full
engine yields one. Measured from the put of the first gate to the end of the last training.

Window 2 runs as recipes have it, with at most one and a half batches in flight; the bound is the same without.

Then the latency of gates in lock step, from the trainer's put to the arrival of the first request that follows, after
steps of 0.1 s and of 5 s, with four groups a batch; that of the runs above, which send hundreds of requests at once,
is told beside it. Everything takes some eleven minutes, on two cores with nothing else on them. The last line
is JSON; exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from scripts.bench.pace.bound import simulate
from scripts.bench.pace.lengths import lengths_of_run
from scripts.bench.pace.runs import options_of, run
from scripts.bench.pace.settings import GROUP_SIZE, MEAN_LENGTH, PACES, SCALES, Scale, setting_of

OVER_BOUND = 0.95  # at least
NONE_OVER_LOCK_STEP = 2.0  # at least
GATE_MS = 20.0  # at most, median
PATIENCE = 2.0  # times as long as the bound, then a run is given up

# Batches, and seconds of a decode step: long enough for two cores to keep up with so many samples.
EFFORT = {SCALES[0]: (12, 0.002), SCALES[1]: (4, 0.010)}


@dataclass(frozen=True)
class GateRun:
    """Lock step with batches of 16 responses of 20 tokens, which all slots write in 0.04 s."""

    name: str
    steps: int
    train_seconds: float

    @property
    def options(self) -> dict[str, Any]:
        load = self.train_seconds / (16 * 20 / 32 * 0.002)  # over the time in which the full engine yields a batch
        shape = {"batch_size": 16, "group_size": 4, "mean_length": 20.0, "sigma": 0.0}
        return {**shape, "steps": self.steps, "step_seconds": 0.002, "trainer_load": load}


GATE_RUNS = (GateRun("0.1 s", 41, 0.03), GateRun("5 s", 7, 4.95))


def measure_scale(scale: Scale, folder: Path, figures: dict[str, Any]) -> None:
    batches, step_seconds = EFFORT[scale]
    length = cache(lengths_of_run(0, GROUP_SIZE, mean=MEAN_LENGTH))
    print(f"{scale}: {batches} batches, {1000 * step_seconds:g} ms a decode step", flush=True)
    seconds = {}
    for name, pace in PACES.items():
        setting = setting_of(scale, pace, batches=batches, step_seconds=step_seconds)
        bound = simulate(setting, length)
        place = folder / f"{scale.engines}_{name}".replace(", ", "_").replace(" ", "_")
        one = run(place, options_of(setting), PATIENCE * bound.seconds)
        seconds[name] = one.seconds
        figures["over_bound"][f"{scale}: {name}"] = over = bound.seconds / one.seconds
        oldest = max(row["staleness_max"] for row in one.rows)
        print(
            f"  {name:<16} {one.seconds:7.2f} s, bound {bound.seconds:7.2f} s: {over:.3f}   "
            f"oldest {oldest} ({max(bound.ages)})   dropped {one.dropped} ({bound.dropped})",
            flush=True,
        )
        if pace["window"] == 1:
            print(f"  {'':<16} gates {spread(one.gate_seconds)}")
            figures["gate_ms_of_whole_batches"][str(scale)] = median_ms(one.gate_seconds)
    ratio = seconds["lock step"] / seconds["none, streaming"]
    figures["none_over_lock_step"][str(scale)] = ratio
    print(f"  none, streaming takes 1/{ratio:.2f} of the time of lock step")


def median_ms(seconds: Sequence[float]) -> float:
    return 1000 * statistics.median(seconds)


def spread(seconds: Sequence[float]) -> str:
    return f"p50 {median_ms(seconds):.1f} ms (at most {1000 * max(seconds):.1f})"


def measure_gates(folder: Path, figures: dict[str, Any]) -> None:
    print("gates: from the put to the first request")
    for kind in GATE_RUNS:
        one = run(folder / f"gates_{kind.train_seconds:g}", kind.options, 2 * kind.steps * (kind.train_seconds + 0.1))
        figures["gate_ms"][kind.name] = median_ms(one.gate_seconds)
        typical = statistics.median(one.step_seconds)
        print(f"  steps of {typical:.2f} s, {len(one.gate_seconds)} gates: {spread(one.gate_seconds)}", flush=True)


def missed(figures: dict[str, Any]) -> list[str]:
    """The bars that are."""
    found = [f"{name}: {x:.4f} of its bound" for name, x in figures["over_bound"].items() if x < OVER_BOUND]
    ratios = figures["none_over_lock_step"].items()
    found += [f"{name}: none is {x:.3f} x lock step" for name, x in ratios if x < NONE_OVER_LOCK_STEP]
    return found + [f"gates after {name}: {x:.2f} ms" for name, x in figures["gate_ms"].items() if x > GATE_MS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small-only", action="store_true", help="not the batches of 2048")
    parser.add_argument("--keep", type=Path, help="a new folder for the runs")
    options = parser.parse_args()
    figures: dict[str, Any] = {"over_bound": {}, "none_over_lock_step": {}, "gate_ms": {}}
    figures["gate_ms_of_whole_batches"] = {}
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        measure_gates(folder, figures)
        for scale in SCALES[:1] if options.small_only else SCALES:
            measure_scale(scale, folder, figures)
    failures = missed(figures)
    for failure in failures:
        print(f"missed: {failure}")
    print(f"load of the machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())} on {os.cpu_count()} cores")
    told = {bar: {name: round(x, 3) for name, x in measured.items()} for bar, measured in figures.items()}
    print(json.dumps({**told, "missed": failures}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
