"""Several ranks in a ring: they use the GPUs together, and the token goes on when all of them have freed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshy.queue.local import free_ports
from meshy.spmd.crew import LOST

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]


def run(folder: Path, world: int, fault: str = "none") -> list[tuple[int, str]]:
    """Exit code and output of every rank."""
    (port,) = free_ports(1)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MESHY_DEVICE": "cpu"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.spmd.ring_rank", str(folder), str(rank), str(world), str(port), fault],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=90)[0] for rank in ranks]
        return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("world", [1, 3])
def test_every_rank_has_freed_before_the_token_goes_on(tmp_path, world):
    ended = run(tmp_path, world)
    assert [code for code, _ in ended] == [0] * world, ended
    assert [line for line in ended[0][1].splitlines() if "passed on" in line] == ["passed on; still used by []"] * 5
    for rank in range(world):
        assert (tmp_path / f"payloads.{rank}").read_text() == "[1, 2, 3, 4]"


@pytest.mark.parametrize(
    ("rank", "how", "where"),
    [
        (1, "raises", "free"), (1, "dies", "execute"),
        *(
            pytest.param(rank, how, where, marks=pytest.mark.prove)
            for rank, how, where in (
                (0, "raises", "execute"), (0, "raises", "setup"), (0, "dies", "free"), (1, "raises", "setup"),
                (1, "dies", "restore"),
            )
        ),
    ],
)  # fmt: skip
def test_a_rank_that_fails_ends_the_replica_and_passes_no_token_on(tmp_path, where, how, rank):
    ended = run(tmp_path, 2, f"rank {rank} {how} in {where}")
    assert [code for code, _ in ended][1 - rank] == LOST, ended
    assert ended[rank][0] == (9 if how == "dies" else 1), ended
    if how == "raises":
        assert f"ValueError: rank {rank} cannot go on in {where}" in ended[rank][1]
    assert f"rank {rank} " in ended[1 - rank][1]
    assert "still used by ['" not in ended[0][1]


def test_ranks_that_follow_do_not_ask_for_the_token(tmp_path):
    ended = run(tmp_path, 2, "ranks enter in execute")
    assert all(code != 0 for code, _ in ended), ended
    assert "it is the leader who enters gpu()" in ended[1][1]
