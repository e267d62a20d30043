"""One recipe at three paces: they differ in configuration only, and the faster pace learns in less time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshy.observe.jsonl import read_jsonl
from meshy.recipe import to_json
from meshy.settings import resolve
from meshy.topology import gpu_list
from scripts.bench.beside_trl import curve
from tests.launch import launched

RECIPES = Path(__file__).parents[2] / "recipes"
DEMO = ("model=recipes/demo_model", "data=meshy.data.addition:addition")


def fields(name: str) -> dict[str, Any]:
    """Every field of a recipe by its path."""
    found: dict[str, Any] = {}

    def walk(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, member in value.items():
                walk(f"{path}.{key}", member)
        else:
            found[path] = value

    recipe, _ = resolve(RECIPES / f"{name}.py", {"gpus": "8"}, gpu_list(1, 8))
    told = json.loads(json.dumps(to_json(recipe)))
    walk("", {**told, "groups": {group["id"]: group for group in told["groups"]}})
    return found


def differing(name: str) -> set[str]:
    plain, other = fields("justrl"), fields(name)
    return {path for path in plain.keys() | other.keys() if plain.get(path) != other.get(path)} - {".name"}


def test_the_recipes_differ_in_configuration_only() -> None:
    rollout, trainer = ".groups.rollout.config.", ".groups.trainer."
    assert differing("justrl_async") == {f"{rollout}window", f"{rollout}max_in_flight"}
    placement = {".groups.inference.replicas", f"{trainer}gpus_per_replica", f"{trainer}colocate_with", ".rings"}
    streaming = {f"{trainer}config.{name}" for name in ("stream_minibatch", "max_staleness")}
    assert differing("justrl_fully_async") == {f"{rollout}window", *placement, *streaming}


def test_they_hold_the_published_settings() -> None:
    plain = fields("justrl")
    trainer, rollout = ".groups.trainer.config.", ".groups.rollout.config."
    expected = {
        f"{trainer}batch_size": 256 * 8, f"{rollout}group_size": 8, ".sampling.max_new_tokens": 15_360,
        ".sampling.temperature": 1.0, f"{trainer}lr": 1e-6, f"{trainer}schedule": "constant",
        f"{trainer}weight_decay": 0.1, f"{trainer}clip_low": 0.2, f"{trainer}clip_high": 0.28,
        f"{trainer}max_grad_norm": 1.0, f"{rollout}group_filter": None,
    }  # fmt: skip
    assert {name: plain[name] for name in expected} == expected


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("name", "oldest"),
    [
        pytest.param("justrl", 0, marks=pytest.mark.prove),
        pytest.param("justrl_async", 1, marks=pytest.mark.prove),
        pytest.param("justrl_fully_async", 2, marks=pytest.mark.prove),
    ],
)
def test_each_runs_on_a_cpu(tmp_path: Path, name: str, oldest: int) -> None:
    small = ("steps=3", "trainer.batch_size=32", "rollout.eval_prompts=8", "sampling.max_new_tokens=40")
    with launched(tmp_path, *DEMO, *small, recipe=str(RECIPES / f"{name}.py"), slots=2) as run:
        assert run.wait(150) == 0, run.output
    steps = read_jsonl(tmp_path / "metrics.jsonl")
    assert [step["samples"] for step in steps] == [32] * 3
    assert all(step["staleness_max"] <= oldest for step in steps)


def seconds_to(accuracy: float, folder: Path, recipe: str, seed: int) -> float:
    """Wall time from the start of the first step until the mean reward of five batches in a row is as high."""
    settings = (*DEMO, "steps=40", "rollout.evaluate=false", f"seed={seed}")
    with launched(folder, *settings, recipe=str(RECIPES / f"{recipe}.py"), slots=2) as run:
        assert run.wait(300) == 0, run.output
    rows = read_jsonl(folder / "metrics.jsonl")
    seconds = curve.seconds_to([curve.Step(row["reward_mean"], row["started"], row["ended"]) for row in rows], accuracy)
    assert seconds is not None, f"{recipe} has not reached {accuracy}"
    return seconds


@pytest.mark.prove
@pytest.mark.timeout(1200)
def test_the_asynchronous_one_learns_in_less_time(tmp_path: Path) -> None:
    """Two seeds together: on two cores both keep busy, and what is saved is some 15 %."""
    names, seeds = ("justrl", "justrl_fully_async"), (0, 1)
    seconds = {name: [seconds_to(0.9, tmp_path / f"{name}.{seed}", name, seed) for seed in seeds] for name in names}
    print(seconds)
    assert sum(seconds["justrl_fully_async"]) < sum(seconds["justrl"])
