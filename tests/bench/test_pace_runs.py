"""Real rollout, queue and gates between an engine and a trainer that sleep: staleness, live rows and memory."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from meshy.observe.ask import ask_json
from meshy.observe.jsonl import read_jsonl
from scripts.bench.pace.runs import RECIPE, read_run, run, settings_of
from tests.launch import Launched, launched

# Six prompts a batch, of 4 responses of 12 tokens in the mean; eight slots write a batch in 36 ms.
TINY: dict[str, Any] = {"batch_size": 24, "group_size": 4, "slots": 8, "step_seconds": 0.001, "mean_length": 12.0}
SLOW_TRAINER, SLOW_GENERATOR = {"trainer_load": 2.0}, {"trainer_load": 0.2}
MAX_STALENESS = 2
NONE: dict[str, Any] = {"window": None, "max_staleness": MAX_STALENESS, "stream": True, "mini_batches": 3}


@pytest.mark.prove
@pytest.mark.e2e
def test_a_run_without_a_window(tmp_path: Path) -> None:
    """As the benchmark starts it: whole batches in the end, each in its parts, and every version is asked for."""
    done = run(tmp_path / "run", {**TINY, **NONE, "steps": 6, "rollouts": 2}, 60.0)
    assert [(row["step"], row["samples"], row["parts"]) for row in done.rows] == [(i, 24, 3) for i in range(1, 7)]
    assert max(row["staleness_max"] for row in done.rows) <= MAX_STALENESS
    assert 0 in done.first_requests
    tokens = sum(row["tokens"] for row in done.rows)
    assert done.seconds > tokens * 0.001 / 8  # the trainer's sleep alone


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rollouts", [1, 3])
@pytest.mark.parametrize("speed", [SLOW_TRAINER, SLOW_GENERATOR], ids=["slow trainer", "slow generator"])
@pytest.mark.parametrize("pace", [{"window": 1}, {"window": 2}, {"window": 4}, NONE], ids=["1", "2", "4", "none"])
def test_no_token_is_older_than_allowed(
    tmp_path: Path, pace: dict[str, Any], speed: dict[str, Any], rollouts: int
) -> None:
    """Over 200 steps; and where the trainer is slow, tokens become as old as they may. A token of a version to come
    would end the run. Where tokens are dropped, for the trainer is slow and takes whatever is there, batches are whole
    all the same."""
    options = {**TINY, **pace, **speed, "rollouts": rollouts, "steps": 200}
    settings = [*settings_of(options), "rollout.log_trajectories=1.0"]
    with launched(tmp_path / "run", *settings, recipe=RECIPE) as started:
        assert started.wait(540) == 0, started.output
    rows = read_run(tmp_path / "run").rows
    assert [row["samples"] for row in rows] == [24] * 200
    window = pace["window"]
    bound = MAX_STALENESS if window is None else window - 1
    oldest = [row["staleness_max"] for row in rows]
    assert max(oldest) <= bound
    if window == 1:
        assert all(row["staleness/0"] == 1.0 for row in rows)
    elif speed is SLOW_TRAINER:
        assert max(oldest) == bound
    dropped = sum(row["dropped"] for row in rows)
    print(f"age at most {max(oldest)}, {dropped} of {200 * 24} samples dropped")
    assert dropped == 0 or window is None
    lines = [line for file in (tmp_path / "run").glob("trajectories*.jsonl") for line in read_jsonl(file)]
    written = Counter(line["position"] for line in lines)
    assert set(written.values()) == {4}
    assert sorted(written) == list(range(len(written))), "every prompt in the data's order, slow ones too"
    assert len(written) * 4 == 200 * 24 + dropped


@pytest.mark.prove
@pytest.mark.timeout(300)
def test_a_trainer_that_is_ten_times_slower(tmp_path: Path) -> None:
    """Samples are there long before they are trained: the oldest go first, so that none has grown too old by then."""
    options = {**TINY, **NONE, "trainer_load": 10.0, "steps": 40}
    done = run(tmp_path / "run", options, 120.0)
    assert [row["samples"] for row in done.rows] == [24] * 40
    assert max(row["staleness_max"] for row in done.rows) == MAX_STALENESS
    assert done.dropped == 0


@dataclass
class Watched:
    """What a thread sees of a run: resident bytes of each process over time, and rows of partition `train`."""

    memory: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    rows: list[int] = field(default_factory=list)


@contextmanager
def watched(started: Launched) -> Iterator[Watched]:
    seen, over = Watched(), threading.Event()
    processes = {name_of(process): process for process in started.processes()}
    topology = json.loads((started.run_dir / "topology.json").read_text())
    admin = topology["queue"]["controller"]["host"], topology["queue"]["admin_port"]

    def look() -> None:
        while not over.wait(0.1):
            try:
                _, table = ask_json(*admin, "/table", 5.0)
                seen.rows.append(table["train"]["rows"] + table["train"]["reserved"])
                for name, process in processes.items():
                    seen.memory[name].append((time.time(), process.memory_info().rss))
            except (OSError, ValueError, psutil.NoSuchProcess):
                return  # the run has ended

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def name_of(process: psutil.Process) -> str:
    words = process.cmdline()
    told = words[-1] if "meshy.service" in words else " ".join(words[1:4])
    return f"{told} ({process.pid})"


@pytest.mark.prove
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("pace", [{"window": 1}, {"window": 2}, NONE], ids=["1", "2", "none"])
def test_memory_and_rows_are_bounded(tmp_path: Path, pace: dict[str, Any]) -> None:
    """Over 2,000 small steps, no process holds more in the last third of the time than in the middle one, but for 3 %
    or 5 MB; and the queue never holds more rows than the pace allows to be alive."""
    tiny = {**TINY, "mean_length": 4.0, "batch_size": 12, "steps": 2000}
    with launched(tmp_path / "run", *settings_of({**tiny, **pace}), recipe=RECIPE) as started:
        started.wait_for_line("step 1/", 150)
        with watched(started) as seen:
            assert started.wait(1000) == 0, started.output
    rows = read_run(tmp_path / "run").rows
    assert len(rows) == 2000
    alive = MAX_STALENESS + 1 if pace["window"] is None else pace["window"]
    assert len(seen.rows) > 100
    assert 0 < max(seen.rows) <= alive * 12
    first, last = rows[0]["ended"], rows[-1]["ended"]
    services = [name for name in seen.memory if name.startswith(("inference.0", "rollout.0", "trainer.0"))]
    assert len(services) == 3, seen.memory.keys()
    for name, moments in seen.memory.items():
        middle, late = (
            max(size for when, size in moments if begin <= (when - first) / (last - first) <= begin + 1 / 3)
            for begin in (1 / 3, 2 / 3)
        )
        print(f"{name}: {middle / 1e6:.1f} MB, then {late / 1e6:.1f} MB")
        assert late < max(1.03 * middle, middle + 5e6), f"{name}: {middle / 1e6:.1f} MB, then {late / 1e6:.1f} MB"
