"""Group-relative advantages of GRPO (arXiv 2402.03300): A_i = (r_i - mean_g) / (std_g + eps)."""

import torch

from meshy.algorithms.groups import group_statistics
from meshy.algorithms.interface import AdvantageInputs, AdvantageOutput

EPS = 1e-6


def grpo_advantage(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_i = (r_i - mean_g) / (std_g + 1e-6), std with ddof=1, computed in float64.

    A group of one has no baseline: its advantage is 0 (r itself would be a signal on another scale). A group whose
    rewards are all equal, up to float noise, gets exactly 0.

    Metrics: `zero_variance_groups` (groups of two or more without a signal), `single_sample_groups`, `groups`.
    Raises ValueError naming the sample if a reward is NaN or infinite.
    """
    groups = group_statistics(inputs)
    squares = torch.zeros_like(groups.mean).index_add_(0, groups.group, groups.deviation.square())
    std = (squares / (groups.size - 1).clamp(min=1)).sqrt()
    advantages = groups.deviation / (std + EPS)[groups.group]
    return AdvantageOutput(advantages=advantages.to(inputs.rewards.dtype), metrics=groups.metrics)
