"""Rings of real processes over the real queue: one holder at a time, whatever dies."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from meshy.observe.ask import ask_json
from tests.colocation.traces import events, hand_offs
from tests.launch import Launched, launched

pytestmark = pytest.mark.e2e

ROLES = "tests/colocation/roles.py"
PHASES = ("before freeing", "after freeing", "after granting", "in restore")


def history(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "ring-shared.jsonl").read_text().splitlines()]


def check(run: Launched, workers: int, turns: int) -> None:
    """Every role had its turns, one after another."""
    assert not (run.run_dir / "two-holders").exists()
    for worker in range(workers):
        assert (run.run_dir / f"done-worker{worker}.0").read_text() == str(turns)
    told = history(run.run_dir)
    assert [line["turn"] for line in told] == list(range(1, len(told) + 1))
    assert all(line["asked"] <= line["began"] <= line["ended"] for line in told)
    assert all(line["ended"] == after["began"] for line, after in itertools.pairwise(told))


def test_roles_take_turns(tmp_path: Path) -> None:
    with launched(tmp_path / "run", "turns=10", "pause=0.05", recipe=ROLES) as run:
        assert run.wait() == 0
        check(run, workers=2, turns=10)
        assert {line["holder"] for line in history(run.run_dir)} == {"idle", "worker0", "worker1"}
        carried = [json.loads(line) for line in (run.run_dir / "trace-idle.0.jsonl").read_text().splitlines()]
        assert [told["payload"] for told in carried if told["event"] == "restore"][-1].keys() == {
            "idle", "worker0", "worker1",
        }  # fmt: skip


@pytest.mark.prove
def test_several_replicas_hold_together(tmp_path: Path) -> None:
    with launched(tmp_path / "run", "turns=8", "workers=1", "replicas=2", recipe=ROLES, slots=2) as run:
        assert run.wait() == 0
        check(run, workers=1, turns=8)
        held = {tuple(line["replicas"]) for line in history(run.run_dir)}
        assert {("worker0.0",), ("idle.0", "idle.1")} <= held


@pytest.mark.prove
def test_who_has_done_its_work_leaves_the_ring_to_the_others(tmp_path: Path) -> None:
    with launched(tmp_path / "run", "turns=8", "leaver=worker0", recipe=ROLES) as run:
        assert run.wait() == 0
        assert (run.run_dir / "done-worker0.0").read_text() == "2"
        assert (run.run_dir / "done-worker1.0").read_text() == "8"
        assert not (run.run_dir / "two-holders").exists()


def crashes(tmp_path: Path, victim: str, where: str, *options: str, slots: int = 1) -> None:
    arguments = ("turns=8", "hold=0.01", "pause=0.05", f"victim={victim}", f"crash={where}", *options)
    with launched(tmp_path / "run", *arguments, recipe=ROLES, slots=slots) as run:
        assert run.wait() == 0
        assert "is started again" in run.output
        check(run, workers=2, turns=8)
        crash = next(at for at, _, event in events(run.run_dir) if event == "crash")
        after = [at for at, who, event in events(run.run_dir) if event == "enter" and at > crash and victim not in who]
        assert after[0] - crash < 15


def test_a_holder_that_is_killed_loses_the_token(tmp_path: Path) -> None:
    crashes(tmp_path, "worker0", "in restore")


@pytest.mark.prove
@pytest.mark.parametrize("where", PHASES)
@pytest.mark.parametrize("victim", ["idle", "worker0"])
def test_killed_in_each_phase(tmp_path: Path, victim: str, where: str) -> None:
    crashes(tmp_path, victim, where)


@pytest.mark.prove
@pytest.mark.parametrize("where", PHASES)
def test_replicas_killed_in_each_phase(tmp_path: Path, where: str) -> None:
    crashes(tmp_path, "idle", where, "replicas=2", slots=2)


@pytest.mark.prove
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("workers", [2, 4])
def test_ten_thousand_hand_offs(tmp_path: Path, workers: int) -> None:
    turns = 10_000 // workers
    with launched(tmp_path / "run", f"turns={turns}", f"workers={workers}", recipe=ROLES) as run:
        run.wait_for_line("queue ready", 60)
        topology = json.loads((run.run_dir / "topology.json").read_text())
        admin = topology["queue"]["controller"]["host"], topology["queue"]["admin_port"]
        rows, memory = [], []
        while run.process.poll() is None:
            try:
                rows.append(ask_json(*admin, "/table", 5.0)[1]["colocate.shared"]["rows"])
            except OSError:
                break  # the run ends
            memory.append(sum(process.memory_info().rss for process in run.processes()))
            time.sleep(2)
        assert run.wait() == 0
        check(run, workers, turns)
        assert len(hand_offs(run.run_dir)) >= 10_000 - workers
        assert max(rows) <= workers + 1 + 3
        third = len(memory) // 3
        assert max(memory[-third:]) < 1.03 * max(memory[third : 2 * third])


@pytest.mark.prove
@pytest.mark.timeout(600)
def test_a_restore_of_three_minutes_passes(tmp_path: Path) -> None:
    with launched(tmp_path / "run", "turns=2", "workers=1", "restoring=180", recipe=ROLES) as run:
        assert run.wait(560) == 0
        check(run, workers=1, turns=2)


@pytest.mark.prove
def test_a_role_without_a_policy_ends_the_run_by_name(tmp_path: Path) -> None:
    with launched(tmp_path / "run", "restarts=0", "victim=worker1", "crash=before freeing", recipe=ROLES) as run:
        assert run.wait() != 0
        assert "worker1.0" in run.output and not (run.run_dir / "two-holders").exists()
        assert not any("in place of" in line["reason"] for line in history(run.run_dir))
        assert not run.left_after(10)
