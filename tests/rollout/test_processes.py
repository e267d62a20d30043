"""Replicas of rollout as the ignitor starts them: processes of `meshy.service`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from meshy.observe.jsonl import read_jsonl
from meshy.observe.runfolder import RunFolder
from meshy.service.context import Launch, run_digest
from meshy.service.readiness import is_ready
from meshy.settings import resolve
from tests.rollout.play import DEADLINE, RUN_ID, Engine, Lead, Trained, Trainer, topology_of, trainer_of
from tests.rollout.roles import MODEL
from tests.rollout.roles import recipe as two_replicas

pytestmark = pytest.mark.e2e

RECIPE = Path(__file__).with_name("roles.py")


@pytest.fixture(scope="module")
def trainer(base_port: int, engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    with trainer_of(topology_of(two_replicas(), base_port), engine, tmp_path_factory.mktemp("queue")) as trainer:
        yield trainer


@contextmanager
def replicas(base_port: int, folder: RunFolder, *names: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of these names; their output is in the run folder's logs."""
    folder.make()
    topology = topology_of(two_replicas(), base_port)
    launch = Launch(
        run_id=RUN_ID,
        run_dir=str(folder.path),
        recipe_file=str(RECIPE),
        settings={},
        gpus=topology.gpus,
        base_port=base_port,
        digest=run_digest(*resolve(RECIPE, {}, topology.gpus, base_port)),
        model_folder=MODEL,
    )
    launch.write(folder.path / "launch.json")
    processes = []
    for name in names:
        with folder.log(name).open("wb") as log:
            command = [sys.executable, "-m", "meshy.service", str(folder.path / "launch.json"), name]
            processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def wait_until_ready(base_port: int, process: subprocess.Popen[bytes]) -> None:
    leader = topology_of(two_replicas(), base_port).replica("rollout.1").leader
    end = time.monotonic() + DEADLINE
    while not is_ready(leader, RUN_ID):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.prove
def test_two_replicas_share_every_batch_and_one_of_them_evaluates(base_port: int, trainer: Trainer, tmp_path: Path):
    folder, recipe = RunFolder(tmp_path / "run"), two_replicas()
    trained = Trained(folder)
    with replicas(base_port, folder, "rollout.0", "rollout.1") as processes:

        def check() -> None:
            for process in processes:
                assert process.poll() in (None, 0), "".join(file.read_text() for file in folder.logs.iterdir())

        Lead(trainer, "shared", recipe, trained, check).run()
        assert [process.wait(DEADLINE) for process in processes] == [0, 0]
    assert trained.positions == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [row["weight_version"] for row in trained.evaluations] == [0, 2]
    for replica, file in enumerate((folder.trajectories, folder.trajectories.with_suffix(".1.jsonl"))):
        assert {line["position"] % 2 for line in read_jsonl(file)} == {replica}


def test_sigterm_ends_a_replica_that_waits_for_a_gate_and_its_reward_workers(
    base_port: int, trainer: Trainer, tmp_path: Path
):
    folder = RunFolder(tmp_path / "run")
    with replicas(base_port, folder, "rollout.1") as (process,):
        wait_until_ready(base_port, process)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 2  # one process a reward worker
        process.terminate()
        assert process.wait(10) == 143, folder.log("rollout.1").read_text()
        assert psutil.wait_procs(children, timeout=5)[1] == []
