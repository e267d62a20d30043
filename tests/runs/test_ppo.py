"""PPO: four models that meet in columns, on slots of their own and in turn on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshy.observe.jsonl import read_jsonl
from tests.runs.test_opd import run, summary

pytestmark = pytest.mark.e2e

RECIPE, IN_A_RING = "recipes/ppo.py", "tests/scoring/ppo_in_a_ring.py"
SMALL = ("steps=3", "trainer.frozen_batches=1", "trainer.batch_size=48", "rollout.eval_prompts=32")


def losses(folder: Path) -> list[tuple[float, ...]]:
    steps, critic = read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "critic.jsonl")
    names = ("loss", "grad_norm", "reward_mean", "kl_in_reward/kl")
    of_critic = ("value_loss", "explained_variance", "return_mean")
    return [
        (*(step[name] for name in names), *(batch[name] for name in of_critic))
        for step, batch in zip(steps, critic, strict=True)
    ]


def test_the_policy_waits_for_the_critic_and_both_learn(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", 1, *SMALL, recipe=IN_A_RING)
    steps, critic = read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "critic.jsonl")
    assert [step["lr"] > 0 for step in steps] == [False, True, True]
    assert abs(steps[0]["kl_in_reward/kl"]) < 1e-6 and abs(steps[1]["kl_in_reward/kl"]) < 1e-6  # still the reference
    assert steps[2]["kl_in_reward/kl"] > 1e-6
    assert critic[0]["value_loss"] > 0 and critic[0]["grad_norm"] > 0
    holders = [turn["holder"] for turn in read_jsonl(folder / "ring-gpus.jsonl")]
    rounds = "".join(holder[0] for holder in holders[-13:])
    assert rounds == "irct" * 3 + "i", holders  # nobody has an idle turn in between


@pytest.mark.prove
@pytest.mark.timeout(600)
def test_apart_it_is_the_same_run(tmp_path: Path) -> None:
    together = run(tmp_path / "together", 1, *SMALL, recipe=IN_A_RING)
    apart = run(tmp_path / "apart", 4, *SMALL, recipe=RECIPE)
    assert losses(together) == losses(apart)
    assert summary(apart)["status"] == "finished"


@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns_the_demo_task(tmp_path: Path, seed: int) -> None:
    folder = run(tmp_path / "run", 4, f"seed={seed}", "steps=40", recipe=RECIPE, deadline=600)
    told = summary(folder)
    late = [batch["explained_variance"] for batch in read_jsonl(folder / "critic.jsonl")[8:]]
    print(told["eval_before"], told["eval_after"], late)
    assert told["eval_after"] >= 0.9
    assert sum(late) / len(late) > 0.2
