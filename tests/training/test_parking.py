"""A trainer gives the device to others between two steps: nothing changes but the memory that it holds."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from tests.training.conftest import run_ranks
from tests.training.models import make_large_model

pytestmark = pytest.mark.e2e

LARGE = 200 << 20


@pytest.fixture(scope="module")
def parked(models) -> dict[int, list[dict]]:
    """What each rank saw, by the number of ranks."""
    make_large_model(models / "large")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(partial(run_ranks, models, program="tests.training.parking_rank"), (1, 2)))
    return {world: [torch.load(models / f"parking{world}.{rank}.pt") for rank in range(world)] for world in (1, 2)}


@pytest.mark.parametrize("world", [1, 2])
def test_training_goes_on_as_if_nothing_had_happened(parked, world):
    for seen in parked[world]:
        stayed, went = seen["stayed"], seen["went"]
        assert len(stayed["moments"]) > len(stayed["weights"])  # there was an optimiser's state to keep
        assert stayed["reports"] == went["reports"]
        for name, weight in stayed["weights"].items():
            assert torch.equal(weight, went["weights"][name]), name
        assert all(torch.equal(a, b) for a, b in zip(stayed["moments"], went["moments"], strict=True))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("when", ["before the first step", "later"])
def test_the_memory_is_really_given_back(parked, world, when):
    told = [seen["memory"][when] for seen in parked[world]]
    held, had, left, again = (sum(rank[name] for rank in told) for name in ("held", "with", "without", "again"))
    assert held >= LARGE
    assert had - left >= 0.9 * held
    assert again - left >= 0.9 * held
