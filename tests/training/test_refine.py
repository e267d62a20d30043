"""What an estimator of tokens is given, and what it must give."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch

from meshy.algorithms.advantages.gae import gae_advantage
from meshy.algorithms.advantages.opd import opd_advantage
from meshy.algorithms.advantages.reinforce_pp import reinforce_pp_advantage
from meshy.algorithms.interface import TokenAdvantages, TokenInputs
from meshy.algorithms.kl_reward import KLInReward
from meshy.columns import Column
from meshy.learning.numbers import check_numbers
from meshy.learning.refine import Refiner, token_inputs, with_column
from meshy.titan.micro_batch import Sample


def sample(mask: list[int], **columns: list[float]) -> Sample:
    tokens = torch.arange(len(mask))
    named = {name: torch.tensor(values) for name, values in columns.items()}
    return Sample(tokens, torch.tensor(mask, dtype=torch.bool), named)


SAMPLES = {
    2: sample([0, 1, 0, 1], rollout_logprobs=[0, -1, 0, -2.0], ref_logprobs=[0, -1, 0, -1.0]),
    5: sample([0, 0], rollout_logprobs=[0, 0.0], ref_logprobs=[0, 0.0]),
    6: sample([0, 1], rollout_logprobs=[0, -3.0], ref_logprobs=[0, float("nan")]),
}
COLUMNS = {"ref_logprobs": Column("ref_logprobs", "float32", "jagged")}
REWARDS = [0.0, 0, 1.0, 0, 0, 7.0, 2.0]


@dataclass
class Alone:
    """The groups of one rank."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values


def test_a_samples_reward_is_at_its_last_token_and_one_without_a_token_has_none():
    inputs = token_inputs(SAMPLES, REWARDS, lambda values: values, COLUMNS)
    assert inputs.rewards.tolist() == [0.0, 1.0, 2.0] and inputs.sequence.tolist() == [0, 0, 2]
    assert inputs.rollout_logprobs.tolist() == [-1.0, -2.0, -3.0] and inputs.advantages.tolist() == [0.0] * 3
    none = token_inputs({}, REWARDS, lambda values: values, COLUMNS)
    assert len(none.rewards) == len(none.sequence) == len(none.rollout_logprobs) == 0


@pytest.mark.parametrize("estimator", [gae_advantage, reinforce_pp_advantage, partial(opd_advantage, teacher="values")])
def test_a_rank_without_samples_goes_through_every_estimator(estimator):
    columns = {**COLUMNS, "values": Column("values", "float32", "jagged")}
    refiner = Refiner(estimator, KLInReward(coef=0.5), Alone(), columns, coef=0.5)  # type: ignore[arg-type]
    output, told = refiner.tokens({}, REWARDS)
    assert output.advantages.shape == (0,) and told["kl_in_reward/kl"] == 0


def test_the_kl_is_taken_from_each_token_and_its_coefficient_adapts():
    seen: list[TokenInputs] = []

    def estimator(inputs: TokenInputs) -> TokenAdvantages:
        seen.append(inputs)
        return TokenAdvantages(advantages=inputs.rewards)

    kl = KLInReward(coef=0.5, target=0.1, horizon=10)
    refiner = Refiner(estimator, kl, Alone(), COLUMNS, coef=kl.coef)  # type: ignore[arg-type]
    output, told = refiner.tokens(SAMPLES, REWARDS)
    assert output.advantages.tolist() == [0.0, 1.0 + 0.5, 2.0]  # k1 of the second is -1; the last has no reference
    assert told == {"kl_in_reward/kl": -0.5, "kl_in_reward/coef": 0.5}
    assert refiner.coef == pytest.approx(0.5 * (1 - 0.2 * 7 / 10))


def test_a_column_is_laid_over_the_written_tokens():
    changed = with_column(SAMPLES, "x", torch.tensor([1.0, 2.0, 3.0]))
    assert [s.columns["x"].tolist() for s in changed.values()] == [[0, 1, 0, 2], [0, 0], [0, 3]]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (torch.zeros(2), r"shape \[2\] where \[3\] were asked for"),
        (torch.zeros(3, 1), r"shape \[3, 1\]"),
        (torch.tensor([0, float("nan"), 0]), "NaN or infinite"),
    ],
)
def test_what_is_not_one_finite_number_each_is_refused(given: torch.Tensor, told: str):
    with pytest.raises(ValueError, match=told):
        check_numbers("advantages", given, torch.zeros(3))
