"""The rule of restarts, alone and in a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshy.ignitor.restarts import FORGIVEN_AFTER, LONGEST_WAIT, Restarts
from meshy.service.exits import FAILED_TO_START, UNRECOVERABLE
from tests.ignitor.roles import ROWS
from tests.launch import launched

KILLED = -9


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_waits_double_up_to_a_bound_and_end_with_the_limit() -> None:
    restarts = Restarts({"a": 8}, Clock())
    waits = []
    for number in range(1, 9):
        restarts.ready("a")
        restart = restarts.after_death("a", KILLED)
        assert restart is not None and restart.number == number
        waits.append(restart.wait)
    assert waits == [1, 2, 4, 8, 16, LONGEST_WAIT, LONGEST_WAIT, LONGEST_WAIT]
    assert restarts.after_death("a", KILLED) is None
    assert restarts.told("a") == " after 8 restarts (max_restarts)"


def test_a_long_life_clears_the_count() -> None:
    clock = Clock()
    restarts = Restarts({"a": 1}, clock)
    for _ in range(3):
        restarts.ready("a")
        clock.now += FORGIVEN_AFTER
        restart = restarts.after_death("a", KILLED)
        assert restart is not None and (restart.number, restart.wait) == (1, 1.0)
    restarts.ready("a")
    clock.now += FORGIVEN_AFTER - 1
    assert restarts.after_death("a", KILLED) is None


def test_only_the_time_of_being_ready_counts_as_life() -> None:
    clock = Clock()
    restarts = Restarts({"a": 1}, clock)
    assert restarts.after_death("a", KILLED) is not None
    clock.now += 2 * FORGIVEN_AFTER  # of loading, which fails
    assert restarts.after_death("a", FAILED_TO_START) is None


def test_one_without_a_policy_is_not_started_again() -> None:
    restarts = Restarts({"a": 0}, Clock())
    assert restarts.after_death("a", KILLED) is None
    assert restarts.after_death("b", KILLED) is None
    assert restarts.told("a") == ""


def test_one_that_never_started_is_given_up_at_once_but_a_second_life_may_be_tried_again() -> None:
    restarts = Restarts({"a": 3}, Clock())
    assert restarts.after_death("a", FAILED_TO_START) is None
    assert restarts.after_death("a", KILLED) is not None
    restart = restarts.after_death("a", FAILED_TO_START)
    assert restart is not None and restart.number == 2


def test_one_that_says_that_it_would_fail_again_is_given_up_whenever_it_does() -> None:
    restarts = Restarts({"a": 3}, Clock())
    assert restarts.after_death("a", KILLED) is not None
    assert restarts.after_death("a", UNRECOVERABLE) is None


@pytest.mark.e2e
def test_a_killed_service_is_started_again_and_given_up_after_its_limit(tmp_path: Path) -> None:
    with launched(tmp_path / "run", "--after", "stay", "scorer.max_restarts=1") as run:
        run.wait_for_line("all services ready")
        first = run.service("scorer.0")
        first.kill()
        run.wait_for_line("scorer.0 is started again in 1 s (restart 1 of 1)")
        run.wait_for_line("scorer.0 is back after")
        second = run.service("scorer.0")
        assert second.pid != first.pid
        second.kill()
        assert run.wait(10) != 0
        assert run.left_after(10) == []
    assert "scorer.0 on 127.0.0.1: was killed by SIGKILL after 1 restart (max_restarts)" in run.output
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["restarts"] == {"scorer.0": 1}
    assert summary["failure"]["service"] == "scorer.0"


@pytest.mark.e2e
@pytest.mark.prove
def test_rows_that_a_killed_service_had_taken_are_given_to_its_next_life(tmp_path: Path) -> None:
    with launched(tmp_path / "run", "scorer.dies=true", "scorer.max_restarts=1") as run:
        run.wait_for_line("scorer.0 is started again in 1 s (restart 1 of 1)")
        assert run.wait(60) == 0
    assert json.loads((run.run_dir / "seen.txt").read_text()) == [float(i + 1) for i in range(ROWS)]


@pytest.mark.prove
@pytest.mark.e2e
def test_one_that_cannot_start_ends_the_run_at_once(tmp_path: Path) -> None:
    with launched(tmp_path / "run", "--after", "refuse to start", "reader.max_restarts=3") as run:
        assert run.wait() != 0
    assert "restart 1 of 3" not in run.output
    assert "ValueError: the reader does not start" in run.output
