"""Bad input is refused before anything is spawned, with what to change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshy.queue.local import free_ports
from tests.launch import ROLES, ROOT

pytestmark = pytest.mark.e2e


def ignitor(*arguments: str) -> str:
    """The output of a single ignitor, started as torchrun would, that must refuse."""
    (port,) = free_ports(1)
    seat = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, "-m", "meshy.ignitor", *arguments], cwd=ROOT, text=True, capture_output=True, timeout=60,
        env={**os.environ, **seat, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stdout
    return done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["recipes/no_such.py"], "there is no recipe file recipes/no_such.py"),
        ([ROLES, "reader.aftr=end"], "reader.aftr: no such field (did you mean 'reader.after'?)"),
        ([ROLES, "steps=many"], "steps: expected int, got 'many'"),
        ([ROLES, "writer.replicas=3"], "too few GPUs: the recipe needs 3 (writer 3 x 1) and there are 1"),
        ([ROLES, "model=./no/such/model"], "there is no model folder no/such/model"),
        ([ROLES, "model=tests"], "tests holds no config.json"),
        ([ROLES, "reader.after=refuse"], "reader.after: expected something else than 'refuse'"),
    ],
)
def test_what_cannot_run_is_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    run_dir = tmp_path / "run"
    output = ignitor(*arguments, "--run-dir", str(run_dir))
    assert "this run cannot start" in output
    assert said in output
    assert not (run_dir / "logs").exists() or not list((run_dir / "logs").iterdir())


def test_a_run_folder_that_cannot_be_written_is_refused() -> None:
    assert "cannot write the run folder /proc/nothing" in ignitor(ROLES, "--run-dir", "/proc/nothing")


def test_a_run_folder_that_is_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    assert "is not empty" in ignitor(ROLES, "--run-dir", str(tmp_path))


def test_without_torchrun_it_says_how_to_start() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "meshy.ignitor", ROLES], env=environment, cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode == 2
    assert "torchrun --standalone --nproc-per-node 2 -m meshy.ignitor" in done.stderr
