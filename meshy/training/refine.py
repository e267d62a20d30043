"""From advantages of samples to those of their tokens, on the rank that trains them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from meshy.algorithms.kl_reward import KLInReward

from meshy.algorithms.interface import AdvantageInputs, AdvantageOutput, TokenAdvantages, TokenInputs
from meshy.importing import load
from meshy.spmd.groups import ProcessGroups
from meshy.titan.micro_batch import Sample
from meshy.training.config import TrainerConfig
from meshy.training.learner import ADVANTAGES

OWN = (ADVANTAGES, "token_versions")  # columns of a sample that are no business of an estimator


def no_advantage(inputs: AdvantageInputs) -> AdvantageOutput:
    """0 for every sample: other things say what is learnt from it."""
    return AdvantageOutput(advantages=torch.zeros_like(inputs.rewards))


@dataclass
class Refiner:
    """estimator: of tokens; None leaves each token the advantage of its sample. kl: what is taken from each token's
    reward. Every rank has one of its own, in the same state."""

    estimator: Callable[[TokenInputs], TokenAdvantages] | None
    kl: KLInReward | None
    groups: ProcessGroups

    @classmethod
    def of(cls, config: TrainerConfig, groups: ProcessGroups) -> "Refiner":
        named = config.token_advantage
        estimator = None if named is None else partial(load(named), **config.token_advantage_options)
        return cls(estimator, config.kl_in_reward, groups)

    def refine(
        self, samples: Mapping[int, Sample], rewards: Sequence[float]
    ) -> tuple[Mapping[int, Sample], dict[str, float]]:
        """This rank's samples, by number, with the advantage of each token in their column, and numbers to report.
        rewards: of all samples of the batch, by number. Collective."""
        if self.estimator is None:
            return samples, {}
        inputs = token_inputs(samples, rewards, self.groups.sum)
        inputs, told = self._penalise(inputs)
        output = self.estimator(inputs)
        counts = [int(sample.loss_mask.sum()) for sample in samples.values()]
        refined = {}
        for (number, sample), values in zip(samples.items(), output.advantages.split(counts), strict=True):
            column = torch.zeros(len(sample.tokens), dtype=torch.float32)
            column[sample.loss_mask] = values.float()
            refined[number] = replace(sample, columns={**sample.columns, ADVANTAGES: column})
        return refined, {**told, **output.metrics}
