"""What the benchmark makes of its figures."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from meshy.observe.jsonl import JsonlWriter
from scripts.bench.pace.bound import simulate
from scripts.bench.pace.lengths import lengths_of_run
from scripts.bench.pace.measure import EFFORT, GATE_RUNS, missed
from scripts.bench.pace.runs import options_of, read_run, settings_of
from scripts.bench.pace.settings import GROUP_SIZE, MEAN_LENGTH, NONE, PACES, SCALES, WINDOW_2, Scale, setting_of

FINE: dict[str, Any] = {
    "over_bound": {"a": 0.95, "b": 1.0},
    "none_over_lock_step": {"a": 2.0},
    "gate_ms": {"5 s": 20.0},
}


def test_every_bar_counts() -> None:
    assert missed(FINE) == []
    assert len(missed({**FINE, "over_bound": {"a": 0.949, "b": 1.0}})) == 1
    assert len(missed({**FINE, "none_over_lock_step": {"a": 1.99}})) == 1
    assert len(missed({**FINE, "gate_ms": {"0.1 s": 3.0, "5 s": 20.1}})) == 1


def test_what_is_simulated_is_what_runs() -> None:
    """The trainer takes as long as all engines together, the default."""
    setting = setting_of(SCALES[1], NONE, batches=4, step_seconds=0.01)
    assert setting.token_seconds == 0.01 / 512
    options = options_of(setting)
    assert (options["engines"], options["slots"], options["batch_size"], options["steps"]) == (16, 32, 2048, 4)
    words = settings_of(options)
    assert {"window=none", "max_staleness=2", "stream=true", "mini_batches=4", "max_in_flight=none"} <= set(words)


def test_a_window_of_two_has_one_and_a_half_batches_in_flight() -> None:
    assert PACES["window 2"] is WINDOW_2
    assert [setting_of(scale, WINDOW_2, batches=2).max_in_flight for scale in SCALES] == [192, 3072]


@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_the_bound_of_a_window_of_two_is_the_same_without_that_limit(scale: Scale) -> None:
    length = cache(lengths_of_run(0, GROUP_SIZE, mean=MEAN_LENGTH))
    limited, free = (simulate(setting_of(scale, pace, batches=3), length) for pace in (WINDOW_2, {"window": 2}))
    assert limited.seconds == pytest.approx(free.seconds, rel=0.005)


@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_without_a_window_gates_and_credits_pace_the_run(scale: Scale) -> None:
    """Fewer batches may be alive than are trained, or all groups would start at the first gate."""
    assert EFFORT[scale][0] > NONE["max_staleness"] + 1


def test_gate_runs_train_as_long_as_they_say() -> None:
    for kind in GATE_RUNS:
        options = kind.options
        tokens = options["batch_size"] * options["mean_length"]
        token_seconds = options["trainer_load"] * options["step_seconds"] / 32
        assert tokens * token_seconds == pytest.approx(kind.train_seconds)


def test_a_run_is_timed_from_gate_to_training_and_from_gate_to_request(tmp_path: Path) -> None:
    """Version 0's gate at 100; versions 1 and 2 trained at 101 and 103, their gates at 101.5 and 103.5; version 1's
    first request 0.25 s after its gate."""
    with JsonlWriter(tmp_path / "metrics.jsonl") as metrics:
        metrics.write(row(1, started=100.0, trained=101.0, gate_put=101.5))
        metrics.write(row(2, started=101.5, trained=103.0, gate_put=103.5))
    with JsonlWriter(tmp_path / "arrivals.0.jsonl") as arrivals:
        arrivals.write({"weight_version": 0, "first_request": 100.5})
        arrivals.write({"weight_version": 1, "first_request": 101.75})
    done = read_run(tmp_path)
    assert (done.seconds, done.gate_seconds, done.step_seconds, done.dropped) == (3.0, [0.25], [1.5, 2.0], 8)


def test_a_run_with_a_step_missing_is_none(tmp_path: Path) -> None:
    with JsonlWriter(tmp_path / "metrics.jsonl") as metrics:
        metrics.write(row(2, started=1.0, trained=2.0, gate_put=2.0))
    with pytest.raises(ValueError, match=r"got \[2\]"):
        read_run(tmp_path)


def row(step: int, **times: float) -> dict[str, Any]:
    step_seconds = times["gate_put"] - times["started"]
    return {"step": step, "weight_version": step, "dropped": 4, "step_seconds": step_seconds, **times}
