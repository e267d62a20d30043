"""What is learnt at each token of this rank's samples: advantages for the policy, returns for a critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from meshy.algorithms.interface import TokenAdvantages, TokenInputs
from meshy.algorithms.kl_reward import KLInReward
from meshy.importing import load
from meshy.spmd.groups import ProcessGroups
from meshy.titan.micro_batch import Sample

ADVANTAGES, ROLLOUT_LOGPROBS = "advantages", "rollout_logprobs"


@dataclass
class Refiner:
    """estimator: of the trainer's `token_advantage`; None where it has none. kl: what is taken from each token's
    reward. Every rank, of the trainer and of a critic, has one of its own, and all stay in the same state."""

    estimator: Callable[[TokenInputs], TokenAdvantages] | None
    kl: KLInReward | None
    groups: ProcessGroups

    @classmethod
    def of(cls, trainer: Any, groups: ProcessGroups) -> Refiner:
        """trainer: the configuration of whoever trains the policy."""
        named = trainer.token_advantage
        estimator = None if named is None else partial(load(named), **trainer.token_advantage_options)
        return cls(estimator, trainer.kl_in_reward, groups)

    def tokens(
        self, samples: Mapping[int, Sample], rewards: Sequence[float]
    ) -> tuple[TokenAdvantages, dict[str, float]]:
        """Of the written tokens of this rank's samples, one sample after another; and numbers to report. rewards: of
        all samples of the batch, by number. Collective."""
        assert self.estimator is not None
        inputs = token_inputs(samples, rewards, self.groups.sum)
        output = self.estimator(inputs)
        return output, dict(output.metrics)


def token_inputs(
    samples: Mapping[int, Sample], rewards: Sequence[float], total: Callable[[Tensor], Tensor]
) -> TokenInputs:
    """samples: by their number in the batch, ascending. rewards: of the whole batch."""
    masks = {number: sample.loss_mask for number, sample in samples.items()}
    counts = [int(mask.sum()) for mask in masks.values()]

    def flat(name: str) -> Tensor:
        return torch.cat([sample.columns[name][sample.loss_mask] for sample in samples.values()])

    last = torch.tensor(counts).cumsum(0)[torch.tensor(counts) > 0] - 1 if counts else torch.zeros(0, dtype=torch.long)
    token_rewards = torch.zeros(sum(counts))
    token_rewards[last] = torch.tensor([rewards[number] for number in samples])[torch.tensor(counts) > 0]
    return TokenInputs(rewards=token_rewards)  # type: ignore[call-arg]


def with_column(samples: Mapping[int, Sample], name: str, flat: Float[Tensor, " tokens"]) -> dict[int, Sample]:
    """The samples with one more column: `flat` at the written tokens, one sample after another, and 0 elsewhere."""
    counts = [int(sample.loss_mask.sum()) for sample in samples.values()]
    changed = {}
    for (number, sample), values in zip(samples.items(), flat.split(counts), strict=True):
        column = torch.zeros(len(sample.tokens), dtype=torch.float32)
        column[sample.loss_mask] = values.float()
        changed[number] = replace(sample, columns={**sample.columns, name: column})
    return changed
