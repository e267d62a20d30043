import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.training.models import make_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """A folder with the four small models."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("qwen3_tied", "qwen3", "qwen2_tied", "qwen2"):
        make_model(name, folder)
    return folder


@pytest.fixture(scope="session")
def computed(models) -> dict[int, dict]:
    """What one rank and what two ranks computed, by the number of ranks: real processes, gloo."""
    return {world: run_ranks(models, world) for world in (1, 2)}


def run_ranks(folder: Path, world: int) -> dict:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MESHY_DEVICE": "cpu"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.rank", str(folder), str(rank), str(world), str(port)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(outputs)
    return torch.load(folder / f"world{world}.pt")
