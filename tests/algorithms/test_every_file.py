"""Every estimator and every loss is one file with one function, found by its import path."""

import inspect
import pkgutil
from importlib import import_module
from typing import get_type_hints

import pytest
import torch

import meshy.algorithms.advantages
import meshy.algorithms.losses
from meshy.algorithms.interface import (
    AdvantageInputs,
    AdvantageOutput,
    LossConfig,
    LossInputs,
    LossOutput,
    TokenAdvantages,
    TokenInputs,
)
from meshy.importing import load
from tests.algorithms.small_batch import LOSSES, Batch


def files(package) -> list[str]:
    return [f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]


def import_path(module: str, kind: str) -> str:
    name = module.rpartition(".")[2]
    return f"{module}:{name}" if name.endswith(f"_{kind}") else f"{module}:{name}_{kind}"


def public_functions(module: str) -> set[str]:
    """Functions that the file itself makes, but for a loss of single tokens that its loss is made of."""
    return {
        name
        for name, value in inspect.getmembers(import_module(module), inspect.isfunction)
        if value.__module__ == module and not name.startswith("_") and not name.endswith("_token_loss")
    }


def first_input(function) -> type:
    return next(iter(get_type_hints(function).values()))


@pytest.mark.parametrize("module", files(meshy.algorithms.advantages), ids=lambda m: m.rpartition(".")[2])
def test_estimator(module):
    path = import_path(module, "advantage")
    assert public_functions(module) == {path.partition(":")[2]}
    estimator = load(path)
    per_token = getattr(estimator, "per_token", False)
    assert first_input(estimator) is (TokenInputs if per_token else AdvantageInputs)
    options = list(inspect.signature(estimator).parameters.values())[1:]
    assert all(option.default is not option.empty for option in options)
    batch = Batch()
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.25])
    if per_token:
        out = estimator(
            TokenInputs(
                rewards=batch.advantages,
                advantages=batch.advantages,
                rollout_logprobs=batch.rollout,
                sequence=batch.sequence,
                columns={"values": batch.advantages / 2, "teacher_logprobs": batch.old},
            )
        )
        assert isinstance(out, TokenAdvantages) and out.advantages.shape == batch.sequence.shape
    else:
        groups = torch.tensor([0, 0, 1, 1, 2])
        out = estimator(AdvantageInputs(rewards=rewards, groups=groups, columns={"greedy_reward": rewards.flip(0)}))
        assert isinstance(out, AdvantageOutput) and out.advantages.shape == rewards.shape
    assert out.advantages.isfinite().all() and (out.advantages != 0).any()
    assert all(isinstance(value, float) for value in out.metrics.values())


@pytest.mark.parametrize("module", files(meshy.algorithms.losses), ids=lambda m: m.rpartition(".")[2])
def test_loss(module):
    path = import_path(module, "loss")
    assert public_functions(module) == {path.partition(":")[2]}
    loss = load(path)
    batch = Batch()
    if first_input(loss) is not LossInputs:  # the critic's, which the critic aggregates
        token_loss, clipped = loss(batch.old, batch.rollout, batch.advantages, 0.2)
        assert token_loss.shape == clipped.shape == batch.sequence.shape
        return
    assert loss in LOSSES  # and so keeps the promises of test_every_loss
    out = loss(batch.inputs(loss, batch.logits.requires_grad_()), LossConfig())
    assert isinstance(out, LossOutput)
    out.loss.backward()
    assert batch.logits.grad.isfinite().all() and (batch.logits.grad != 0).any()
