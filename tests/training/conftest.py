import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshy.queue.local import free_ports
from meshy.training.weights.folder import write_weights
from tests.training.models import make_model
from tests.training.queues import TrainQueue, train_queue

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """A folder with the four small models, and one of them in bfloat16."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("qwen3_tied", "qwen3", "qwen2_tied", "qwen2"):
        make_model(name, folder)
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "qwen3_tied/model.safetensors").items()}
    write_weights(folder / "qwen3_bf16", weights.items(), folder / "qwen3_tied")
    return folder


@pytest.fixture(scope="session")
def computed(models) -> dict[int, dict]:
    """What one rank and what two ranks computed, by the number of ranks: real processes, gloo."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(partial(run_ranks, models), (1, 2)))
    return {world: torch.load(models / f"world{world}.pt") for world in (1, 2)}


@pytest.fixture(scope="session")
def shared_queue() -> Iterator[TrainQueue]:
    with train_queue() as queue:
        yield queue


@pytest.fixture
def queue(shared_queue) -> Iterator[TrainQueue]:
    yield shared_queue
    shared_queue.empty()


def run_ranks(folder: Path, world: int, program: str = "tests.training.rank") -> None:
    (port,) = free_ports(1)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MESHY_DEVICE": "cpu"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", program, str(folder), str(rank), str(world), str(port)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(outputs)
