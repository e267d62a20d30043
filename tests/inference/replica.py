"""The process of an inference replica, as an ignitor starts it, without the rest of the run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from meshy.ignitor.ports import PortBlock
from meshy.inference.service import InferenceService
from meshy.observe.runfolder import RunFolder
from meshy.service.context import Context, Launch, run_digest
from meshy.service.readiness import is_ready
from meshy.settings import load_recipe, resolve
from meshy.topology import FIRST_BASE_PORT, LAST_BASE_PORT, Gpu, Topology, derive_topology

RECIPE = "recipes/grpo_sync.py"
NAME = "inference.0"
HOST = "127.0.0.1"
GPUS = tuple(Gpu(rank, HOST, rank, "cpu") for rank in range(2))
TAG = "MESHY_TEST_TAG"


class ReplicaProcess:
    """A running `inference.0`. Every process that it starts carries its tag in the environment, where it can be read:
    SGLang's schedulers write their title over it, and are found as descendants (`remember`).
    """

    def __init__(self, folder: RunFolder, topology: Topology, command: list[str]) -> None:
        self.folder = folder
        self.replica = topology.replica(NAME)
        self.url = self.replica.url
        self._tag = uuid.uuid4().hex
        self._remembered: set[psutil.Process] = set()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd(), TAG: self._tag}
        with folder.log(NAME).open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    @property
    def log(self) -> str:
        return self.folder.log(NAME).read_text(errors="replace")

    def wait_ready(self, deadline: float) -> None:
        end = time.monotonic() + deadline
        while not is_ready(self.replica.leader, self.folder.name):
            assert self.process.poll() is None and time.monotonic() < end, self.log[-4000:]
            time.sleep(0.05)

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(self._admin("/health"), timeout=10) as answer:
            return json.load(answer)

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(self._admin("/metrics"), timeout=10) as answer:
            lines = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines()]
        return {name.partition("{")[0]: float(value) for name, value in lines}

    def _admin(self, path: str) -> str:
        return f"http://{self.replica.host}:{self.replica.leader.admin_port}{path}"

    def remember(self) -> set[psutil.Process]:
        """All descendants of now; they count as the replica's when their parents are gone."""
        self._remembered |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self._remembered

    def processes(self) -> list[psutil.Process]:
        """Every living process of the replica, itself included."""
        return [one for one in {*self._remembered, *psutil.process_iter()} if self._is_mine(one)]

    def _is_mine(self, one: psutil.Process) -> bool:
        try:
            alive = one.is_running() and one.status() != psutil.STATUS_ZOMBIE
            return alive and (one in self._remembered or one.environ().get(TAG) == self._tag)
        except psutil.Error:
            return False  # gone meanwhile, or not ours to look at

    def left_after(self, seconds: float) -> list[str]:
        """What is still alive when `seconds` have passed, or nothing as soon as that is so."""
        end = time.monotonic() + seconds
        while (alive := self.processes()) and time.monotonic() < end:
            self.process.poll()  # our own child: it is reaped here
            psutil.wait_procs([p for p in alive if p.pid != self.process.pid], timeout=0.1)
        return [str(process) for process in alive]


@contextmanager
def launch_file(run_dir: Path, model: Path, **settings: str) -> Iterator[tuple[Path, Topology]]:
    """A run in which `inference.0` can be started: its launch file, and its topology on ports that are kept for it."""
    chosen = {name.replace("__", "."): value for name, value in settings.items()}
    block = PortBlock(HOST)
    topology = free_topology(block, chosen)
    folder = RunFolder(run_dir).make()
    launch = Launch(
        run_id=folder.name,
        run_dir=str(folder.path),
        recipe_file=RECIPE,
        settings=chosen,
        gpus=topology.gpus,
        base_port=topology.base_port,
        digest=run_digest(*resolve(RECIPE, chosen, topology.gpus, topology.base_port)),
        model_folder=str(model.absolute()),
    )
    launch.write(folder.path / "launch.json")
    try:
        yield folder.path / "launch.json", topology
    finally:
        block.release()


@contextmanager
def replica_process(run_dir: Path, model: str = "recipes/demo_model", **settings: str) -> Iterator[ReplicaProcess]:
    """`settings` of the recipe, with `__` for the dot: inference__engine="sglang". All is gone when the block ends."""
    with launch_file(run_dir, Path(model), **settings) as (file, topology):
        process = ReplicaProcess(RunFolder(run_dir), topology, [sys.executable, "-m", "meshy.service", str(file), NAME])
        try:
            yield process
        finally:
            for one in process.processes():
                one.send_signal(signal.SIGKILL)
            process.process.wait()


@contextmanager
def service_here(run_dir: Path, model: Path, **settings: str) -> Iterator[InferenceService]:
    """The service of `inference.0` in this process, set up as outside a ring."""
    with launch_file(run_dir, model, **settings) as (file, _):
        service = InferenceService(Context.load(file, NAME))
        try:
            service.setup()
            yield service
        finally:
            service.close()
            service.disconnect()


def free_topology(block: PortBlock, settings: dict[str, str]) -> Topology:
    """The first recipe's, on free ports that `block` then holds."""
    recipe = load_recipe(RECIPE, settings, len(GPUS))
    for _ in range(50):
        topology = derive_topology(recipe, GPUS, random.randrange(FIRST_BASE_PORT, LAST_BASE_PORT, 2048))
        if not block.claim(topology.ports_on(HOST)):
            return topology
    raise RuntimeError("no free block of ports")
