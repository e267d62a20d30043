"""Runs of the pace benchmark: real processes between an engine and a trainer that sleep, and what they have noted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshy.observe.jsonl import read_jsonl
from meshy.observe.runfolder import RunFolder
from scripts.bench.pace.bound import Setting

ROOT = Path(__file__).parents[3]
RECIPE = "scripts/bench/pace/recipe.py"
STARTING = 120.0  # seconds, and ending


@dataclass(frozen=True)
class Run:
    """rows: of metrics.jsonl, one a version. first_requests: by version, when its first request came, unix seconds."""

    rows: Sequence[dict[str, Any]]
    first_requests: dict[int, float]

    @property
    def seconds(self) -> float:
        """From the put of the first gate to the end of the last training."""
        return float(self.rows[-1]["trained"] - self.rows[0]["started"])

    @property
    def dropped(self) -> int:
        return sum(row["dropped"] for row in self.rows)

    @property
    def gate_seconds(self) -> list[float]:
        """From the put of each gate but the first and the last to the first request that follows it. For lock step:
        otherwise requests may come between the new version and its gate."""
        return [self.first_requests[row["weight_version"]] - row["gate_put"] for row in self.rows[:-1]]

    @property
    def step_seconds(self) -> list[float]:
        """From gate to gate."""
        return [row["step_seconds"] for row in self.rows]


def read_run(folder: Path) -> Run:
    rows = read_jsonl(RunFolder(folder).metrics)
    if not rows or any(row["step"] != i + 1 for i, row in enumerate(rows)):
        raise ValueError(f"{folder}: expected the steps from 1 on, got {[row['step'] for row in rows]}")
    first: dict[int, float] = {}
    for file in folder.glob("arrivals.*.jsonl"):  # one of each engine
        for row in read_jsonl(file):
            version, when = row["weight_version"], row["first_request"]
            first[version] = min(when, first.get(version, when))
    return Run(rows, first)


def options_of(setting: Setting) -> dict[str, Any]:
    """Options of the recipe for what `setting` says of the simulation."""
    return {
        "steps": setting.batches,
        "batch_size": setting.batch_size,
        "group_size": setting.group_size,
        "engines": setting.engines,
        "slots": setting.slots,
        "step_seconds": setting.step_seconds,
        "window": setting.window,
        "max_staleness": setting.max_staleness,
        "mini_batches": setting.mini_batches,
        "stream": setting.stream,
        "max_in_flight": setting.max_in_flight,
    }


def settings_of(options: dict[str, Any]) -> list[str]:
    """As they stand on the command line."""
    return [f"{name}={str(value).lower()}" for name, value in options.items()]


def run(folder: Path, options: dict[str, Any], deadline: float) -> Run:
    """A whole run of the recipe in a fresh folder. RuntimeError where it does not end well in `deadline` seconds beside
    those of its start."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command += ["-m", "meshy.ignitor", RECIPE, *settings_of(options), "--run-dir", str(folder)]
    output = folder.with_suffix(".out")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            status = process.wait(deadline + STARTING)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGTERM)  # the ignitor ends its services
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise RuntimeError(f"{folder}: not done after {error.timeout:.0f} s\n{tail(output)}") from None
            raise
    if status:
        raise RuntimeError(f"{folder}: exit code {status}\n{tail(output)}")
    return read_run(folder)


def tail(output: Path, lines: int = 40) -> str:
    return "\n".join(output.read_text(errors="replace").splitlines()[-lines:])
