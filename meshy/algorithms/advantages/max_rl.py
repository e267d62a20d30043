"""MaxRL (arXiv 2602.02710): the deviation from the group's mean, in units of that mean."""

import torch

from meshy.algorithms.groups import EQUAL_WITHIN, group_statistics
from meshy.algorithms.interface import AdvantageInputs, AdvantageOutput


def max_rl_advantage(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_i = (r_i - mean_g) / mean_g, for rewards that say right or wrong: the rarer a success, the more it counts.

    0 where the mean is 0, up to float noise, or negative. A group of one, and a group whose rewards are all equal, get
    exactly 0. Metrics and errors are those of GRPO.
    """
    groups = group_statistics(inputs)
    positive = groups.mean > EQUAL_WITHIN * groups.scale
    mean = torch.where(positive, groups.mean, 1.0)[groups.group]
    advantages = torch.where(positive[groups.group], groups.deviation / mean, 0.0)
    return AdvantageOutput(advantages=advantages.to(inputs.rewards.dtype), metrics=groups.metrics)
