"""Whole runs of small roles: how they start, end, fail and are stopped. Roles, queue and torchrun are real."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest

from meshy.queue.local import free_ports
from tests.launch import launched

pytestmark = pytest.mark.e2e


def test_a_run_of_roles_from_outside_the_package(tmp_path: Path) -> None:
    """Writer, scorer and reader live in a test module; the reader waits for the scorer's column."""
    with launched(tmp_path / "run", slots=2) as run:
        assert run.wait() == 0, run.output
        assert run.left_after(10) == []
    folder = run.run_dir
    assert (folder / "seen.txt").read_text() == str([float(i + 1) for i in range(12)])
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    assert json.loads((folder / "recipe.json").read_text())["groups"][2]["config"]["after"] == "end"
    assert {log.name for log in (folder / "logs").iterdir()} == {
        "queue.log",
        "writer.0.log",
        "scorer.0.log",
        "reader.0.log",
    }


@pytest.mark.prove
def test_what_a_dying_service_said_last_is_printed(tmp_path: Path) -> None:
    with launched(tmp_path / "run", "--after", "raise") as run:
        assert run.wait() != 0
        assert run.left_after(10) == []
    assert "reader.0 on 127.0.0.1 ended with exit code 1" in run.output
    assert "ValueError: the reader has had enough" in run.output
    assert str(run.run_dir / "logs" / "reader.0.log") in run.output
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["failure"]["service"]) == ("failed", "reader.0")


@pytest.mark.parametrize(
    "victim",
    [pytest.param("writer.0", marks=pytest.mark.prove), pytest.param("reader.0", marks=pytest.mark.prove), "queue"],
)
def test_killing_any_service_ends_the_run_by_its_name(tmp_path: Path, victim: str) -> None:
    with launched(tmp_path / "run", "--after", "stay") as run:
        run.wait_for_line("all services ready")
        if victim == "queue":
            next(p for p in run.processes() if "meshy.queue.server" in p.cmdline()).kill()
        else:
            run.service(victim).kill()
        assert run.wait(10) != 0
        assert run.left_after(10) == []
    assert f"{victim} on 127.0.0.1 was killed by SIGKILL" in run.output


@pytest.mark.parametrize(
    "signals",
    [
        *(pytest.param([name], marks=pytest.mark.prove) for name in ("SIGINT", "SIGTERM")),
        ["SIGINT", "SIGINT"],
        ["SIGKILL"],
    ],
)
def test_stopping_torchrun_leaves_nothing_behind(tmp_path: Path, signals: list[str]) -> None:
    """One role pays no heed to SIGTERM, so that it must be killed."""
    with launched(tmp_path / "run", "--after", "deaf", slots=2) as run:
        run.wait_for_line("all services ready")
        for name in signals:
            run.process.send_signal(getattr(signal, name))
        assert run.left_after(10) == []
        assert run.wait(10) != 0


def test_an_interrupt_while_ignitors_wait_for_one_another_ends_at_once(tmp_path: Path) -> None:
    with launched(tmp_path / "run", "--after", "slow", slots=2) as run:
        run.wait_for_line("looking at the data")
        run.process.send_signal(signal.SIGINT)
        assert run.left_after(10) == []
        assert run.wait(10) != 0


@pytest.mark.prove
def test_the_death_of_an_ignitor_ends_the_run(tmp_path: Path) -> None:
    with launched(tmp_path / "run", "--after", "stay", slots=2) as run:
        run.wait_for_line("all services ready")
        next(
            p for p in run.processes() if "meshy.ignitor" in p.cmdline() and "torch.distributed.run" not in p.cmdline()
        ).kill()
        assert run.left_after(10) == []
        assert run.wait(10) != 0


@pytest.mark.prove
def test_two_runs_at_once_take_different_ports(tmp_path: Path) -> None:
    with launched(tmp_path / "a", "--after", "stay") as a, launched(tmp_path / "b", "--after", "stay") as b:
        a.wait_for_line("all services ready")
        b.wait_for_line("all services ready")
        bases = {json.loads((run.run_dir / "topology.json").read_text())["base_port"] for run in (a, b)}
        assert len(bases) == 2
        for run in (a, b):
            run.process.send_signal(signal.SIGTERM)
        assert a.left_after(10) == b.left_after(10) == []


def test_a_taken_port_is_refused_with_its_holder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        base = taken.getsockname()[1] - 8  # the controller's first port
        with launched(tmp_path / "run", f"base_port={base}") as run:
            assert run.wait() != 0
    assert f"port {base + 8} on 127.0.0.1, meant for queue.controller, cannot be had" in run.output
    assert "it is held by process" in run.output
    assert not (run.run_dir / "logs").exists() or not list((run.run_dir / "logs").iterdir())


def test_two_hosts(tmp_path: Path) -> None:
    """Two torchruns with two loopback addresses: services on both, one queue, one end."""
    (port,) = free_ports(1)
    agents = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))
    with (
        launched(
            tmp_path / "run", "--on-gpu", "true", torchrun=(*agents, "--node-rank", "0"), MESHY_HOST="127.0.0.1"
        ) as a,
        launched(
            tmp_path / "run", "--on-gpu", "true", torchrun=(*agents, "--node-rank", "1"), MESHY_HOST="127.0.0.2"
        ) as b,
    ):
        assert (a.wait(), b.wait()) == (0, 0), a.output + b.output
        assert a.left_after(10) == b.left_after(10) == []
    topology = json.loads((tmp_path / "run" / "topology.json").read_text())
    assert {service["name"]: service["host"] for service in topology["services"]} == {
        "writer.0": "127.0.0.1", "scorer.0": "127.0.0.1", "reader.0": "127.0.0.2",
    }  # fmt: skip
    assert (tmp_path / "run" / "seen.txt").exists()
