"""Functions that a recipe names are tried before anything is spawned."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from meshy.algorithms.interface import (
    AdvantageInputs,
    AdvantageOutput,
    LossConfig,
    LossInputs,
    LossOutput,
    TokenInputs,
    per_token,
)
from meshy.learning import trial
from meshy.settings import resolve
from meshy.topology import gpu_list

RECIPES = Path(__file__).parents[2] / "recipes"
GPUS = {"opd": 3, "ppo": 4, "grpo_sync": 2}
LOSSES, ADVANTAGES = "meshy.algorithms.losses", "meshy.algorithms.advantages"


HERE = "tests.training.test_preflight"


def no_gradient(inputs: LossInputs, config: LossConfig) -> LossOutput:
    return LossOutput(loss=inputs.logprobs.detach().sum())


def by_token(inputs: LossInputs, config: LossConfig) -> LossOutput:
    return LossOutput(loss=-inputs.logprobs)


def bare(inputs: LossInputs, config: LossConfig) -> torch.Tensor:
    return inputs.logprobs.sum()


def one_too_many(inputs: AdvantageInputs) -> AdvantageOutput:
    return AdvantageOutput(advantages=torch.zeros(len(inputs.rewards) + 1))


def no_number(inputs: AdvantageInputs) -> AdvantageOutput:
    return AdvantageOutput(advantages=inputs.rewards / 0)


@per_token
def of_samples(inputs: TokenInputs) -> AdvantageOutput:
    return AdvantageOutput(advantages=inputs.rewards)


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
        ("opd", {"loss_options.ids": "teacher_ids"}, "reads the column 'teacher_ids', which is not there"),
        ("ppo", {"token_advantage_options.lamda": "0.9"}, "has no such option (did you mean 'lam'?)"),
        ("ppo", {"token_advantage_options.values": "value"}, "gae_advantage reads the column 'value'"),
        ("grpo_sync", {"loss": f"{LOSSES}.gspo:gspo_los"}, "has no 'gspo_los' (did you mean 'gspo_loss'?)"),
        ("grpo_sync", {"loss": f"{LOSSES}.none:loss"}, "there is no module"),
        ("grpo_sync", {"loss": "meshy.columns:TRAIN"}, "is a str; name a function"),
        ("grpo_sync", {"advantage": f"{ADVANTAGES}.gae:gae_advantage"}, "takes tokens; name it as token_advantage"),
        ("grpo_sync", {"advantage": f"{ADVANTAGES}.remax:remax_advantage"}, "reads the column 'greedy_reward'"),
        ("grpo_sync", {"token_advantage": f"{ADVANTAGES}.grpo:grpo_advantage"}, "takes whole samples"),
        ("opd", {"loss_options.cap": "-1"}, "loss_options.cap: cap of a divergence must be more than 0"),
        ("opd", {"loss_options.logprob_min": "5"}, "loss_options.logprob_min: logprob_min must be less than 0"),
        ("opd", {"loss_options.beta": "abc"}, "loss_options.beta: option 'beta' of student_topk_loss: expected"),
        ("ppo", {"token_advantage_options.lam": "high"}, "token_advantage_options.lam: option 'lam' of"),
        ("grpo_sync", {"loss": f"{HERE}:no_gradient"}, "it gave a loss of shape [] and value 0.0"),
        ("grpo_sync", {"loss": f"{HERE}:by_token"}, "it gave a loss of shape [0]"),
        ("grpo_sync", {"loss": f"{HERE}:bare"}, "it returned a Tensor, not a LossOutput"),
        ("grpo_sync", {"advantage": f"{HERE}:one_too_many"}, "gave advantages of shape [17] where [16] were asked for"),
        ("opd", {"loss": f"{LOSSES}.ppo_clip:ppo_clip_loss"}, "learns from advantages, and there are none; set"),
        ("opd", {"loss_options.beta": "0.3"}, "loss_options.beta: beta is for divergence='jsd', and this is 'reverse'"),
        ("grpo_sync", {"advantage": f"{HERE}:no_number"}, "gave advantages that are NaN or infinite"),
        ("grpo_sync", {"token_advantage": f"{HERE}:of_samples"}, "returned a AdvantageOutput, not a TokenAdvantages"),
        ("ppo", {"token_advantage": f"{ADVANTAGES}.reinforce_pp_baseline:reinforce_pp_baseline_advantage",
                 "token_advantage_options": "{}"}, "kl_in_reward: "),
        ("grpo_sync", {"spmd_backend": "spmd_types"}, "spmd_backend: expected 'partial_dtensor'"),
    ],
)  # fmt: skip
def test_what_will_not_work_is_said(name: str, settings: dict[str, str], told: str):
    (fault,) = faults(name, **settings)
    assert told in fault


def test_groups_of_one_sample_have_nothing_to_be_compared_with():
    recipe, _ = resolve(RECIPES / "grpo_sync.py", {"rollout.group_size": "1"}, gpu_list(1, 2))
    (fault,) = recipe.group("trainer").config.preflight(recipe)
    assert "gives 0 for every sample of groups of 1, though their rewards differ; set group_size" in fault


def test_advantages_that_nothing_is_learned_from_matter_only_to_a_loss_that_needs_them():
    assert faults("opd", advantage=f"{ADVANTAGES}.grpo:grpo_advantage") == []
    whitened = f"{ADVANTAGES}.reinforce_pp_baseline:reinforce_pp_baseline_advantage"
    (fault,) = faults("grpo_sync", advantage="none", token_advantage=whitened)
    assert "reinforce_pp_baseline_advantage gives 0 for every sample of groups of 8" in fault
    assert faults("grpo_sync", token_advantage=whitened) == []


@pytest.mark.parametrize(
    "estimate",
    [
        lambda inputs: (inputs.rewards - inputs.rewards.mean()) / inputs.columns["length"],
        lambda inputs: inputs.rewards * inputs.columns["length"],
        lambda inputs: (inputs.rewards > 5).float(),
    ],
)
def test_estimators_of_ones_own_are_tried_with_numbers_as_they_may_come(estimate):
    def own(inputs: AdvantageInputs) -> AdvantageOutput:
        return AdvantageOutput(advantages=estimate(inputs))

    assert trial.advantage_faults("advantage", own, {}, ["length"], 8) == []
    assert not trial.learns_nothing(own, None, ["length"], [], 8)


def test_a_policy_that_cannot_be_trained_is_said(tmp_path: Path):
    folder = Path(shutil.copytree(RECIPES / "demo_model", tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    recipe, _ = resolve(RECIPES / "grpo_sync.py", {"model": str(folder)}, gpu_list(1, 2))
    (fault,) = recipe.group("trainer").config.preflight(recipe)
    assert "cannot train the run's model" in fault and "model_type 'llama' is not supported" in fault
