"""recipes/ppo.py with its four models in turn on the same slots."""

from __future__ import annotations

import dataclasses

from meshy.importing import load_file
from meshy.recipe import FALLBACK, ON_DEMAND, ColocationRing, Recipe

PPO = load_file("recipes/ppo.py")
ASKING = ("reference", "critic", "trainer")


def recipe(gpus: int = 1) -> Recipe:
    plain: Recipe = PPO.recipe(gpus=4)
    groups = tuple(
        dataclasses.replace(group, colocate_with="inference", wait_for=("inference",)) if group.id in ASKING else group
        for group in plain.groups
    )
    members = (("inference", FALLBACK), *((id, ON_DEMAND) for id in ASKING))
    return dataclasses.replace(plain, groups=groups, rings=(ColocationRing(id="gpus", members=members),))
