"""What is refused of models that score, before anything is spawned."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from meshy.algorithms.interface import TokenAdvantages, TokenInputs, per_token
from meshy.algorithms.kl_reward import KLInReward
from meshy.contract import derive_contract
from meshy.importing import load_file
from meshy.recipe import Recipe, RecipeError
from meshy.refusals import type_faults, value_faults
from meshy.scoring.config import TeacherConfig
from meshy.scoring.preflight import teacher_faults
from meshy.settings import resolve
from meshy.topology import gpu_list
from meshy.training.terms import LossTerm

ROOT = Path(__file__).parents[2]
OPD, PPO = (load_file(ROOT / "recipes" / f"{name}.py") for name in ("opd", "ppo"))
KL = "meshy.algorithms.losses.kl_loss:kl_loss"
ADAPTIVE = KLInReward(coef=0.1, target=0.01)
DEMO = ROOT / "recipes" / "demo_model"


def refused(name: str, gpus: int, **settings: str) -> str:
    with pytest.raises(RecipeError) as error:
        resolve(ROOT / "recipes" / f"{name}.py", {"gpus": str(gpus), **settings}, gpu_list(1, gpus))
    return "\n".join(error.value.faults)


def changed(recipe: Recipe, group: str, **options: Any) -> Recipe:
    groups = tuple(
        dataclasses.replace(g, config=dataclasses.replace(g.config, **options)) if g.id == group else g
        for g in recipe.groups
    )
    return dataclasses.replace(recipe, groups=groups)


def without(recipe: Recipe, group: str) -> Recipe:
    groups = tuple(
        dataclasses.replace(g, wait_for=tuple(id for id in g.wait_for if id != group))
        for g in recipe.groups
        if g.id != group
    )
    return dataclasses.replace(recipe, groups=groups)


def test_a_column_that_nobody_reads_and_one_that_nobody_writes():
    unread = refused("opd", 3, **{"trainer.also_consumes": "student_topk_ids"})
    assert (
        "train.teacher_topk_logprobs" in unread
        and "is read by nobody: name it in the trainer's also_consumes" in unread
    )

    _, faults = derive_contract(without(OPD.recipe(), "teacher").declarations())
    assert any("'trainer' consumes train.teacher_topk_logprobs, which nothing produces" in fault for fault in faults)
    _, faults = derive_contract(without(PPO.recipe(), "critic").declarations())
    assert any("'trainer' consumes train.values, which nothing produces" in fault for fault in faults)
    nobody_tells = refused("opd", 3, **{"rollout.candidates": "0"})
    assert "'teacher' consumes train.student_topk_ids, which nothing produces" in nobody_tells


@pytest.mark.parametrize(
    ("group", "options", "told"),
    [
        ("teacher", {"scores": ()}, "teacher.scores: expected one at least"),
        ("teacher", {"scores": ("candidates", "topk")}, "candidates or topk, not both"),
        ("teacher", {"scores": ("sampled", "sampled")}, "teacher.scores: expected each of them once"),
        ("teacher", {"k": 0}, "teacher.k: expected at least 1"),
        ("teacher", {"prefix": "a b"}, "teacher.prefix: expected a name"),
        ("teacher", {"temperature": 0.0}, "teacher.temperature: expected more than 0"),
        ("teacher", {"evaluate": -1}, "teacher.evaluate"),
        ("teacher", {"part_mb": 0}, "teacher.part_mb"),
        ("teacher", {"rows": 0}, "teacher.rows: expected at least 1"),
        ("teacher", {"rows": 129}, "129 never come together where a batch has 128"),
        ("teacher", {"tokens_per_micro_batch": 8}, "teacher.tokens_per_micro_batch: expected at least"),
        ("critic", {"clip": 0.0}, "critic.clip: expected more than 0"),
        ("critic", {"epochs": 0}, "critic.epochs"),
        ("critic", {"clip": math.nan}, "critic.clip: expected more than 0"),
        ("critic", {"mini_batches": 10_000}, "critic.mini_batches: expected at most the trainer's batch_size"),
        ("trainer", {"rewards": {"reward": 0.0}}, "trainer.rewards: expected a column and its weight at least"),
        ("trainer", {"terms": (LossTerm(loss=KL), LossTerm(loss=KL))}, "trainer.terms: 2 of them are called 'kl_loss'"),
        ("trainer", {"frozen_batches": 10_000}, "trainer.frozen_batches: expected less than steps"),
        (
            "trainer",
            {"kl_in_reward": ADAPTIVE, "stream_minibatch": True},
            "with stream_minibatch a critic's batches are",
        ),
        ("trainer", {"kl_in_reward": KLInReward(reference="rollout_logprobs", coef=0.1)}, "what rollout writes of the"),
        ("critic", {"lr": -1.0}, "critic.lr"),
        ("critic", {"max_restarts": 1}, "critic.max_restarts: this role cannot begin in the middle"),
        ("trainer", {"token_advantage": None, "token_advantage_options": {}}, "a critic learns the returns"),
    ],
)
def test_values_out_of_range_are_named(group: str, options: dict[str, Any], told: str):
    recipe = (PPO if group in ("critic", "trainer") else OPD).recipe()
    assert any(told in fault for fault in value_faults(changed(recipe, group, **options)))


@pytest.mark.parametrize(
    ("group", "options", "told"),
    [
        ("trainer", {"rewards": {"reward": math.nan}}, "trainer.rewards.reward: expected a finite number, got nan"),
        ("trainer", {"terms": (LossTerm(loss=KL, weight=math.inf),)}, "trainer.terms[0].weight: expected a finite"),
        ("trainer", {"kl_in_reward": KLInReward(coef=math.inf)}, "trainer.kl_in_reward.coef: expected a finite number"),
        ("trainer", {"betas": (0.9, math.inf)}, "trainer.betas[1]: expected a finite number, got inf"),
        ("trainer", {"loss_options": {"x": {1, 2}}}, "trainer.loss_options: expected what can be written as JSON"),
        ("critic", {"lr": math.inf}, "critic.lr: expected a finite number, got inf"),
    ],
)
def test_numbers_that_are_none_and_values_that_cannot_be_written_down_are_named(
    group: str, options: dict[str, Any], told: str
):
    (fault,) = type_faults(changed(PPO.recipe(), group, **options))
    assert fault.startswith(told)


def test_a_number_that_may_be_infinite():
    assert type_faults(changed(PPO.recipe(), "critic", max_grad_norm=math.inf)) == []


def test_two_critics_are_one_too_many():
    recipe = PPO.recipe()
    groups = tuple(dataclasses.replace(g, replicas=2) if g.id == "critic" else g for g in recipe.groups)
    assert any("expected 1 critic, got 2" in f for f in value_faults(dataclasses.replace(recipe, groups=groups)))


def test_candidates_are_ids_of_tokens():
    _, faults = derive_contract(changed(OPD.recipe(), "teacher", candidates="rollout_logprobs").declarations())
    assert any("'teacher' expects jagged2d int32, but it is produced as jagged float32" in fault for fault in faults)


def critic_faults_with(trainer: dict[str, Any] | None = None, **critic: Any) -> list[str]:
    recipe = changed(changed(PPO.recipe(), "critic", **critic), "trainer", **trainer or {})
    return recipe.group("critic").config.preflight(recipe)


def no_returns(inputs: TokenInputs) -> TokenAdvantages:
    return TokenAdvantages(advantages=inputs.rewards)


def test_a_critic_must_get_returns_from_the_columns_that_it_has():
    assert critic_faults_with() == []
    (fault,) = critic_faults_with({"token_advantage": per_token(no_returns), "token_advantage_options": {}})
    assert "it gives no returns, and a critic learns from them" in fault
    (fault,) = critic_faults_with({"token_advantage_options": {"values": "old_values"}})
    assert "gae_advantage reads the column 'old_values', which is not there" in fault and "critic's columns" in fault
    (fault,) = critic_faults_with(also_consumes=("reward",))
    assert "also_consumes: reward is scalar float32, and a critic reads numbers of tokens" in fault


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The demo model with a tokenizer in which two tokens have changed places."""
    folder = tmp_path / "other"
    shutil.copytree(DEMO, folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    names = {id: token for token, id in vocabulary.items()}
    vocabulary[names[40]], vocabulary[names[200]] = 200, 40
    file.write_text(json.dumps(tokenizer))
    return folder


def faults_of(**options: Any) -> list[str]:
    return teacher_faults(TeacherConfig(**options), OPD.recipe())


def test_a_teacher_of_another_tokenizer_is_refused_with_the_first_id_that_differs(other: Path, tmp_path: Path):
    assert faults_of(model=str(DEMO)) == [] == faults_of()
    (fault,) = faults_of(model=str(other))
    assert "id 40 is" in fault and "give a token_map" in fault
    swapped = [{40: 200, 200: 40}.get(id, id) for id in range(264)]
    for name, entries, told in (
        ("right", swapped, None),
        ("short", swapped[:-1], "263 entries for the 264 ids"),
        ("beyond", [*swapped[:-1], 264], "entry 263 is 264"),
        ("twice", [*swapped[:-1], 5], "entries 5 and 263 are both 5"),
    ):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(entries))
        faults = faults_of(model=str(other), token_map=str(file))
        assert (faults == []) if told is None else any(told in fault for fault in faults), (name, faults)
    assert "cannot be read" in faults_of(model=str(other), token_map=str(tmp_path / "none.json"))[0]


def test_more_candidates_than_tokens_are_refused():
    (fault,) = faults_of(scores=("topk",), k=265)
    assert "k: expected at most 264, the size of the vocabulary, got 265" in fault
    assert faults_of(scores=("topk",), k=264) == []


def resized(folder: Path, size: int) -> Path:
    """The demo model with so many ids; its tokenizer stays."""
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": size}))
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    old = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.cat([old, torch.zeros(max(0, size - len(old)), old.shape[1])])[:size]
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    return folder


def test_a_model_may_have_more_ids_than_the_policy_and_not_fewer(tmp_path: Path):
    assert faults_of(model=str(resized(tmp_path / "wide", 320)), scores=("vocabulary", "topk"), k=264) == []
    (fault,) = faults_of(model=str(resized(tmp_path / "narrow", 263)))
    assert "it has 263 token ids and the policy 264" in fault


def test_a_model_that_is_not_there_or_takes_shorter_rows(tmp_path: Path):
    assert "there is no model folder" in faults_of(model=str(tmp_path / "none"))[0]
    folder = tmp_path / "short"
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    assert "takes rows of 64 tokens, but context_length is 128" in faults_of(model=str(folder))[0]
    (folder / "model.safetensors").unlink()
    assert "holds no *.safetensors file" in faults_of(model=str(folder))[0]
