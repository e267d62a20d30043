"""What is learnt at each token of this rank's samples: advantages for the policy, returns for a critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from meshy.algorithms.columns import column
from meshy.algorithms.interface import TokenAdvantages, TokenInputs
from meshy.algorithms.kl_reward import KLInReward, adapted
from meshy.algorithms.token_rewards import at_last_tokens, token_rewards
from meshy.columns import Column
from meshy.importing import load
from meshy.learning.blank import without_tokens
from meshy.learning.numbers import check_numbers, check_shape
from meshy.spmd.groups import ProcessGroups
from meshy.titan.micro_batch import Sample

ADVANTAGES, ROLLOUT_LOGPROBS = "advantages", "rollout_logprobs"


@dataclass
class Refiner:
    """estimator: of the trainer's `token_advantage`; None where it has none. kl: what is taken from each token's
    reward. columns: per-token ones that the estimator may read. Every rank, of the trainer and of a critic, has one of
    its own, and all stay in the same state, for all are given the same batches."""

    estimator: Callable[[TokenInputs], TokenAdvantages] | None
    kl: KLInReward | None
    groups: ProcessGroups
    columns: Mapping[str, Column]
    coef: float = 0.0  # of the KL, as it is now

    @classmethod
    def of(cls, trainer: Any, groups: ProcessGroups, columns: Mapping[str, Column]) -> Refiner:
        """trainer: the configuration of whoever trains the policy."""
        named = trainer.token_advantage
        estimator = None if named is None else partial(load(named), **trainer.token_advantage_options)
        kl: KLInReward | None = trainer.kl_in_reward
        return cls(estimator, kl, groups, columns, 0.0 if kl is None else kl.coef)

    def tokens(
        self, samples: Mapping[int, Sample], rewards: Sequence[float]
    ) -> tuple[TokenAdvantages, dict[str, float]]:
        """Of the written tokens of this rank's samples, one sample after another; and numbers to report. rewards: of
        all samples of the batch, by number. Collective."""
        assert self.estimator is not None
        inputs = token_inputs(samples, rewards, self.groups.sum, self.columns)
        inputs, told = self._penalised(inputs, len(rewards))
        output = self.estimator(inputs)
        check_numbers("advantages", output.advantages, inputs.rewards)
        if output.returns is not None:
            check_shape("returns", output.returns, inputs.rewards)
        return output, {**told, **output.metrics}

    def _penalised(self, inputs: TokenInputs, count: int) -> tuple[TokenInputs, dict[str, float]]:
        """With the KL taken out of the rewards; the coefficient is adapted afterwards, the same on every rank. count:
        samples of the batch."""
        if self.kl is None:
            return inputs, {}
        reference = column(inputs.columns, self.kl.reference, "kl_in_reward")
        coef = self.coef
        rewards, kl = token_rewards(inputs.rewards, inputs.rollout_logprobs, reference, coef=coef, kind=self.kl.kind)
        scored = ~kl.isnan()
        sums = self.groups.sum(torch.stack([kl[scored].double().sum(), scored.double().sum()]))
        mean = float(sums[0] / sums[1].clamp(min=1))
        if self.kl.target is not None:
            self.coef = adapted(coef, mean, count, self.kl.target, self.kl.horizon)
        return replace(inputs, rewards=rewards), {"kl_in_reward/kl": mean, "kl_in_reward/coef": coef}


def token_inputs(
    samples: Mapping[int, Sample],
    rewards: Sequence[float],
    total: Callable[[Tensor], Tensor],
    columns: Mapping[str, Column],
) -> TokenInputs:
    """samples: this rank's, perhaps none, by their number in the batch. rewards: of the whole batch. total, columns:
    see TokenInputs."""
    written = [sample.loss_mask for sample in samples.values()]
    counts = torch.tensor([int(mask.sum()) for mask in written], dtype=torch.long)
    sequence = torch.arange(len(written)).repeat_interleave(counts)

    def flat(name: str) -> Tensor:
        parts = [sample.columns[name][mask] for sample, mask in zip(samples.values(), written, strict=True)]
        return torch.cat(parts) if parts else torch.zeros(0)

    with_advantages = any(ADVANTAGES in sample.columns for sample in samples.values())
    mine = torch.tensor([rewards[number] for number in samples], dtype=torch.float32)
    return TokenInputs(
        rewards=at_last_tokens(mine, sequence),
        advantages=flat(ADVANTAGES) if with_advantages else torch.zeros(len(sequence)),
        rollout_logprobs=flat(ROLLOUT_LOGPROBS),
        sequence=sequence,
        columns={name: flat(name) if samples else without_tokens(column) for name, column in columns.items()},
        total=total,
    )


def with_column(samples: Mapping[int, Sample], name: str, flat: Float[Tensor, " tokens"]) -> dict[int, Sample]:
    """The samples with one more column: `flat` at the written tokens, one sample after another, and 0 elsewhere."""
    counts = [int(sample.loss_mask.sum()) for sample in samples.values()]
    changed = {}
    for (number, sample), values in zip(samples.items(), flat.split(counts), strict=True):
        column = torch.zeros(len(sample.tokens), dtype=torch.float32)
        column[sample.loss_mask] = values.float()
        changed[number] = replace(sample, columns={**sample.columns, name: column})
    return changed
