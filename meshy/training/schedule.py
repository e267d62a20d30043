"""The learning rate as a pure function of the optimiser step."""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int, *, peak: float, total: int, schedule: Schedule = "constant", warmup: int = 0, final_factor: float = 0.0
) -> float:
    """Of optimiser step `step` (0, 1, ... total - 1): a linear rise over the first `warmup` steps, then constant, or a
    linear or cosine fall to `final_factor` * peak at the last step."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
    match schedule:
        case "constant":
            return peak
        case "linear":
            share = 1.0 - progress
        case "cosine":
            share = 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            raise ValueError(f"unknown schedule {schedule!r}; choose constant, linear or cosine")
    return peak * (final_factor + (1.0 - final_factor) * share)
