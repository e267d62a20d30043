"""Groups of samples that answer one prompt, and how each sample differs from the mean of its group."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from meshy.algorithms.interface import AdvantageInputs

# Rewards of a group that differ by no more than float32 rounding are equal: their advantage is exactly 0.
EQUAL_WITHIN = 1e-6


@dataclass(frozen=True, kw_only=True)
class GroupStatistics:
    """Groups may differ in size. All of it is float64.

    group: dense group number of each sample. size, mean: of each group. scale: its largest |reward|. flat: a group of
    two or more whose rewards are equal, up to float noise. deviation: reward less its group's mean; exactly 0 in a flat
    group, and in a group of one, which has no baseline (the reward itself would be a signal on another scale).
    """

    group: Int[Tensor, " samples"]
    size: Float[Tensor, " groups"]
    mean: Float[Tensor, " groups"]
    scale: Float[Tensor, " groups"]
    flat: Bool[Tensor, " groups"]
    deviation: Float[Tensor, " samples"]

    @property
    def metrics(self) -> Mapping[str, float]:
        """`groups`, `zero_variance_groups` (of two or more, without a signal), `single_sample_groups`."""
        return {
            "groups": float(self.size.numel()),
            "zero_variance_groups": float(self.flat.sum()),
            "single_sample_groups": float((self.size == 1).sum()),
        }


def group_statistics(inputs: AdvantageInputs) -> GroupStatistics:
    """Raises ValueError naming the sample if a reward is NaN or infinite."""
    require_finite(inputs.rewards, inputs.names, "reward")
    rewards = inputs.rewards.double()
    _, group = torch.unique(inputs.groups, return_inverse=True)
    zeros = rewards.new_zeros(int(group.max()) + 1 if group.numel() else 0)
    size = zeros.index_add(0, group, torch.ones_like(rewards))
    mean = zeros.index_add(0, group, rewards) / size
    scale = zeros.scatter_reduce(0, group, rewards.abs(), "amax")
    highest = zeros.scatter_reduce(0, group, rewards, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, group, rewards, "amin", include_self=False)
    equal = highest - lowest <= EQUAL_WITHIN * scale
    return GroupStatistics(
        group=group,
        size=size,
        mean=mean,
        scale=scale,
        flat=equal & (size > 1),
        deviation=torch.where(equal[group], 0.0, rewards - mean[group]),
    )


def require_finite(values: Float[Tensor, " samples"], names: tuple[str, ...], what: str) -> None:
    """Raises ValueError naming the first sample whose value is NaN or infinite: one such value spoils its group."""
    bad = (~torch.isfinite(values)).nonzero().flatten().tolist()
    if bad:
        name = f"sample {names[bad[0]]}" if names else f"row {bad[0]}"
        more = f" ({len(bad)} such samples in this batch)" if len(bad) > 1 else ""
        raise ValueError(f"{what} of {name} is {values[bad[0]].item()}{more}; a {what} must be a finite number")
