"""REINFORCE leave-one-out (RLOO, arXiv 2402.14740): the mean of a group's other samples is the baseline."""

from meshy.algorithms.groups import group_statistics
from meshy.algorithms.interface import AdvantageInputs, AdvantageOutput


def rloo_advantage(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_i = r_i - mean of the others' rewards = n / (n - 1) (r_i - mean_g): unbiased, for no sample is part of its own
    baseline.

    A group of one has no others: its advantage is 0. A group whose rewards are all equal, up to float noise, gets
    exactly 0. Metrics and errors are those of GRPO.
    """
    groups = group_statistics(inputs)
    factor = groups.size / (groups.size - 1).clamp(min=1)
    advantages = factor[groups.group] * groups.deviation
    return AdvantageOutput(advantages=advantages.to(inputs.rewards.dtype), metrics=groups.metrics)
