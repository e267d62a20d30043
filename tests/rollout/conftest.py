"""One engine and one queue for all tests of rollout: real processes, on ports that are free now."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator

import pytest

from meshy.ignitor.ports import PortBlock
from meshy.rollout.config import RolloutConfig
from meshy.topology import FIRST_BASE_PORT, LAST_BASE_PORT
from tests.rollout.play import HOST, Engine, Play, topology_of, trainer_of
from tests.rollout.roles import MODEL, recipe_of


@pytest.fixture(scope="session")
def base_port() -> Iterator[int]:
    """The first port of a block that stays ours."""
    block = PortBlock(HOST)
    recipe = recipe_of(replicas=3)
    for _ in range(50):
        base = random.randrange(FIRST_BASE_PORT, LAST_BASE_PORT, 2048)
        if not block.claim(topology_of(recipe, base).ports_on(HOST)):
            yield base
            block.release()
            return
    raise RuntimeError("no free block of ports")


@pytest.fixture(scope="session")
def engine(base_port: int) -> Iterator[Engine]:
    """The embedded engine with the demo model."""
    url = topology_of(recipe_of(), base_port).urls("inference")[0]
    command = [
        sys.executable,
        "-m",
        "meshy.inference.embedded",
        "--model-path",
        MODEL,
        "--port",
        url.rpartition(":")[2],
    ]
    process = subprocess.Popen([*command, "--threads", "1"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "ready on" in line, f"the engine did not start: {line!r}"
        yield Engine(url)
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def play(base_port: int, engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    """A stage for one run after the other, of one replica of rollout; the test itself is the trainer."""
    roomy = recipe_of(RolloutConfig(group_size=4, window=16))
    with trainer_of(topology_of(roomy, base_port), engine, tmp_path_factory.mktemp("queue")) as trainer:
        yield Play(trainer, tmp_path_factory.mktemp("runs"))
