"""What is refused before anything is spawned, with real SGLang asked."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from meshy.inference.choice import choose
from meshy.inference.config import InferenceConfig
from meshy.inference.sglang.arguments import VERSION
from meshy.inference.sglang.interpreter import interpreter
from meshy.recipe import Recipe
from meshy.settings import load_recipe
from tests.inference.replica import RECIPE
from tests.launch import launched

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(240)]


def faults(gpus: int = 1, model: Path | None = None, **fields: Any) -> list[str]:
    """What the first recipe is refused for with these fields of its inference."""
    recipe: Recipe = load_recipe(RECIPE, {}, 2)
    config = InferenceConfig(engine="sglang", **fields)
    group = dataclasses.replace(recipe.group("inference"), config=config, gpus_per_replica=gpus)
    recipe = dataclasses.replace(recipe, groups=(group, *recipe.groups[1:]), model=str(model or recipe.model))
    return config.faults(recipe) + config.preflight(recipe)


def test_the_first_recipe_is_fine():
    assert faults() == []
    assert faults(server_args={"schedule_policy": "lpm", "disable_radix_cache": True}) == []


def test_arguments_that_it_does_not_have_or_that_meshy_sets():
    assert faults(server_args={"schedule_polcy": "lpm", "tensor_parallel_size": 2}) == [
        f"server_args.schedule_polcy: SGLang {VERSION} has no such argument (did you mean 'schedule_policy'?)",
        "server_args.tensor_parallel_size: Meshy sets this itself; set tp instead",
    ]


def test_values_that_it_does_not_take():
    (fault,) = faults(server_args={"schedule_policy": "fastest"})
    assert "argument --schedule-policy: invalid choice: 'fastest' (choose from 'lpm'" in fault


def test_a_tp_that_does_not_divide_the_heads():
    (fault,) = faults(gpus=3)
    assert "the model's 4 attention heads do not divide by tp=3" in fault


def test_a_model_that_nobody_knows(tmp_path: Path):
    config = json.loads(Path("recipes/demo_model/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["NobodyForCausalLM"]}))
    (fault,) = faults(model=tmp_path)
    assert f"SGLang {VERSION} cannot load a NobodyForCausalLM" in fault


def test_auto_finds_it_in_an_interpreter_that_is_named():
    python = str(interpreter(None))
    choice = choose(InferenceConfig(python=python), on_gpu=True)
    assert (choice.engine, choice.why) == ("sglang", f"auto: there is a GPU, and {python} has SGLang {VERSION}")


def test_a_run_is_refused_before_anything_is_spawned(tmp_path: Path):
    argument = 'inference.server_args={"schedule_polcy": "lpm"}'
    with launched(tmp_path / "run", "inference.engine=sglang", argument, recipe=RECIPE, slots=2) as run:
        assert run.wait(120) != 0
    assert f"inference.server_args.schedule_polcy: SGLang {VERSION} has no such argument" in run.output
    assert not run.run_dir.exists()
