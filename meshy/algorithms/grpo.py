"""Group-relative advantages of GRPO (arXiv 2402.03300): A_i = (r_i - mean_g) / (std_g + eps)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from meshy.algorithms.interface import AdvantageInputs, AdvantageOutput

EPS = 1e-6
# Rewards of a group that differ by no more than float32 rounding are equal: their advantage is exactly 0.
EQUAL_WITHIN = 1e-6


def grpo_advantage(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_i = (r_i - mean_g) / (std_g + 1e-6), std with ddof=1, computed in float64.

    A group of one has no baseline: its advantage is 0 (r itself would be a signal on another scale). A group whose
    rewards are all equal, up to float noise, gets exactly 0.

    Metrics: `zero_variance_groups` (groups of two or more without a signal), `single_sample_groups`, `groups`.
    Raises ValueError naming the sample if a reward is NaN or infinite.
    """
    require_finite(inputs)
    rewards = inputs.rewards.double()
    mean, spread, size, group = group_statistics(rewards, inputs.groups)
    deviation = rewards - mean[group]
    variance = torch.zeros_like(mean).index_add_(0, group, deviation.square()) / (size - 1).clamp(min=1)
    scale = torch.zeros_like(mean).scatter_reduce_(0, group, rewards.abs(), "amax")
    flat = spread <= EQUAL_WITHIN * scale
    advantages = torch.where((flat | (size == 1))[group], 0.0, deviation / (variance.sqrt() + EPS)[group])
    metrics = {
        "groups": float(size.numel()),
        "zero_variance_groups": float((flat & (size > 1)).sum()),
        "single_sample_groups": float((size == 1).sum()),
    }
    return AdvantageOutput(advantages=advantages.to(inputs.rewards.dtype), metrics=metrics)


def group_statistics(
    rewards: Float[Tensor, " samples"], groups: Int[Tensor, " samples"]
) -> tuple[Float[Tensor, " groups"], Float[Tensor, " groups"], Float[Tensor, " groups"], Int[Tensor, " samples"]]:
    """(mean, max - min, size) of each group, and the dense group index of each sample. Groups may differ in size."""
    _, group = torch.unique(groups, return_inverse=True)
    count = int(group.max()) + 1 if group.numel() else 0
    zeros = rewards.new_zeros(count)
    size = zeros.index_add(0, group, torch.ones_like(rewards))
    mean = zeros.index_add(0, group, rewards) / size
    highest = zeros.scatter_reduce(0, group, rewards, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, group, rewards, "amin", include_self=False)
    return mean, highest - lowest, size, group


def require_finite(inputs: AdvantageInputs) -> None:
    """Raises ValueError naming the first sample whose reward is NaN or infinite: one such value spoils its group."""
    bad = (~torch.isfinite(inputs.rewards)).nonzero().flatten().tolist()
    if bad:
        name = f"sample {inputs.names[bad[0]]}" if inputs.names else f"row {bad[0]}"
        more = f" ({len(bad)} such samples in this batch)" if len(bad) > 1 else ""
        raise ValueError(f"reward of {name} is {inputs.rewards[bad[0]].item()}{more}; a reward must be a finite number")
