"""From the columns of a sample to its reward: the same for whoever trains the policy and whoever trains a critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from meshy.algorithms.overlong import Overlong, penalty
from meshy.columns import N_WRITTEN


@dataclass(frozen=True, kw_only=True)
class RewardRule:
    """weights: of the columns that add up to the reward; a row that lacks one (NaN) has 0 of it. overlong: what long
    responses lose. max_length: tokens that a response can have."""

    weights: Mapping[str, float] = field(default_factory=lambda: {"reward": 1.0})
    overlong: Overlong | None = None
    max_length: int = 0

    @classmethod
    def of(cls, trainer: Any, max_length: int) -> RewardRule:
        """trainer: the configuration of whoever trains the policy."""
        return cls(weights=trainer.rewards, overlong=trainer.overlong, max_length=max_length)

    def parts(self, columns: Mapping[str, Float[Tensor, " samples"]]) -> dict[str, Float[Tensor, " samples"]]:
        """What adds up to the reward: what each column gives, and `overlong`. columns: those of `weights`, and the
        tokens that the policy wrote (`n_written`)."""
        parts = {name: weight * columns[name].float().nan_to_num(0.0) for name, weight in self.weights.items()}
        if self.overlong is not None:
            rule = self.overlong
            written = columns[N_WRITTEN.name].tolist()
            parts["overlong"] = torch.tensor(
                [penalty(int(n), self.max_length, rule.buffer, rule.factor) for n in written]
            )
        return parts

    def rewards(self, columns: Mapping[str, Float[Tensor, " samples"]]) -> Float[Tensor, " samples"]:
        """The sum of `parts`."""
        return total(self.parts(columns))


def total(parts: Mapping[str, Float[Tensor, " samples"]]) -> Float[Tensor, " samples"]:
    """The reward that these add up to."""
    return torch.stack(list(parts.values())).sum(0)
