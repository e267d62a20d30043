"""Functions that a recipe names are tried before anything is spawned."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshy.settings import resolve
from meshy.topology import gpu_list

RECIPES = Path(__file__).parents[2] / "recipes"
GPUS = {"opd": 3, "ppo": 4, "grpo_sync": 2}
LOSSES, ADVANTAGES = "meshy.algorithms.losses", "meshy.algorithms.advantages"


def faults(name: str, **settings: str) -> list[str]:
    gpus = GPUS[name]
    given = {"gpus": str(gpus), **{f"trainer.{field}": value for field, value in settings.items()}}
    recipe, _ = resolve(RECIPES / f"{name}.py", given, gpu_list(1, gpus))
    return recipe.group("trainer").config.preflight(recipe)


@pytest.mark.parametrize("name", GPUS)
def test_recipes_are_fine(name: str):
    assert faults(name) == []


@pytest.mark.parametrize("loss", ["gspo:gspo_loss", "cispo:cispo_loss", "sapo:sapo_loss", "dppo:dppo_loss"])
def test_every_policy_loss_can_be_tried(loss: str):
    assert faults("grpo_sync", loss=f"{LOSSES}.{loss}") == []


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("opd", {"loss_options.divergance": "jsd"}, "student_topk_loss has no option 'divergance'"),
        ("opd", {"loss_options.ids": "teacher_ids"}, "reads the column 'teacher_ids', which the trainer does not have"),
        ("ppo", {"token_advantage_options.lamda": "0.9"}, "has no such option (did you mean 'lam'?)"),
        ("ppo", {"token_advantage_options.values": "value"}, "gae_advantage reads the column 'value'"),
        ("grpo_sync", {"loss": f"{LOSSES}.gspo:gspo_los"}, "has no 'gspo_los' (did you mean 'gspo_loss'?)"),
        ("grpo_sync", {"loss": f"{LOSSES}.none:loss"}, "there is no module"),
        ("grpo_sync", {"loss": "meshy.columns:TRAIN"}, "is a str; name a function"),
        ("grpo_sync", {"advantage": f"{ADVANTAGES}.gae:gae_advantage"}, "takes tokens; name it as token_advantage"),
        ("grpo_sync", {"advantage": f"{ADVANTAGES}.remax:remax_advantage"}, "reads the column 'greedy_reward'"),
        ("grpo_sync", {"token_advantage": f"{ADVANTAGES}.grpo:grpo_advantage"}, "takes whole samples"),
    ],
)  # fmt: skip
def test_what_will_not_work_is_said(name: str, settings: dict[str, str], told: str):
    (fault,) = faults(name, **settings)
    assert told in fault
