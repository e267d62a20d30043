"""All interleavings of small rings: never two holders, turns without a gap, nobody left waiting."""

from __future__ import annotations

import random

import pytest

from meshy.recipe import FALLBACK, ON_DEMAND
from tests.colocation.world import World

TWO = (("inference", FALLBACK, 1), ("trainer", ON_DEMAND, 1))
THREE = (("inference", FALLBACK, 1), ("teacher", ON_DEMAND, 1), ("trainer", ON_DEMAND, 1))
FOUR = (*THREE, ("critic", ON_DEMAND, 1))
REPLICAS = (("inference", FALLBACK, 2), ("trainer", ON_DEMAND, 1))
SHARED = (("inference", FALLBACK, 1), ("teacher", ON_DEMAND, 2))


def explore(start: World, depth: int) -> int:
    """Every state within so many steps; all comes to a good end from the last ones. Returns how many there are."""
    seen = {start.key()}
    level = [start]
    for _ in range(depth):
        following = []
        for world in level:
            for step in world.steps():
                after = world.copy()
                after.take(*step)
                if (key := after.key()) not in seen:
                    seen.add(key)
                    following.append(after)
        if not following:
            break
        level = following
    for world in level:
        world.settle()
    return len(seen)


@pytest.mark.parametrize(
    ("members", "wants", "crashes", "depth"),
    [(TWO, 1, 0, 40), (TWO, 1, 1, 8), (REPLICAS, 1, 1, 5), (THREE, 1, 1, 5), (SHARED, 1, 1, 5)],
)
def test_every_interleaving(members, wants, crashes, depth):
    assert explore(World(members, wants, crashes), depth) > 100


@pytest.mark.prove
@pytest.mark.parametrize(
    ("members", "wants", "crashes", "depth"),
    [(TWO, 2, 2, 13), (REPLICAS, 1, 1, 9), (THREE, 1, 1, 9), (FOUR, 1, 1, 7), (SHARED, 1, 1, 9)],
)
def test_every_interleaving_to_a_greater_depth(members, wants, crashes, depth):
    assert explore(World(members, wants, crashes), depth) > 10_000


@pytest.mark.parametrize("members", [TWO, THREE, FOUR, REPLICAS, SHARED])
def test_random_interleavings(members):
    for seed in range(60):
        draw = random.Random(seed)
        world = World(members, wants=3, crashes=4)
        for _ in range(draw.randrange(10, 250)):
            steps = [step for step in world.steps() if step[0] != "kill" or draw.random() < 0.1]
            if not steps:
                break
            world.take(*draw.choice(steps))
        world.settle()
