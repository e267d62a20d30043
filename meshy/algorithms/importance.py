"""Rollout importance sampling: weights pi_train / pi_rollout for what the inference engine sampled.

Truncated weights are TIS (as in V-trace, arXiv 1802.01561); a weight of 0 outside the bounds is IcePop (2510.18855),
and, with an upper bound only, the capped behaviour weight of decoupled PPO (2505.24298).
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from meshy.algorithms.correction import Action, Level
from meshy.algorithms.ratios import bounded_ratio
from meshy.algorithms.sequences import sequence_max, sequence_mean, sequence_sum


def importance_ratios(
    train_logprobs: Float[Tensor, " tokens"],
    rollout_logprobs: Float[Tensor, " tokens"],
    sequence: Int[Tensor, " tokens"],
    level: Level,
) -> Float[Tensor, " tokens"]:
    """Of each token, with d = train - rollout: exp(d) ("token"); or, the same for all tokens of a sequence, exp(sum d)
    ("sequence") or exp(mean d) ("geometric"). The exponent is clamped to +-20. Detached.
    """
    log_ratio = (train_logprobs - rollout_logprobs).detach()
    match level:
        case "token":
            pass
        case "sequence":
            log_ratio = sequence_sum(log_ratio, sequence)[sequence]
        case "geometric":
            log_ratio = sequence_mean(log_ratio, sequence)[sequence]
        case _:
            raise ValueError(f"unknown level {level!r} of importance weights; choose token, sequence or geometric")
    return bounded_ratio(log_ratio)


def bounded_weights(
    ratios: Float[Tensor, " tokens"], action: Action, low: float | None, high: float | None
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """(weight, keep) of each token; its factor is their product.

    "truncate" moves a ratio outside [low, high] to the bound and keeps all; "mask" keeps those within, as they are.
    None is no bound.
    """
    least, most = 0.0 if low is None else low, math.inf if high is None else high
    match action:
        case "truncate":
            return ratios.clamp(least, most), torch.ones_like(ratios, dtype=torch.bool)
        case "mask":
            return ratios, (ratios >= least) & (ratios <= most)
    raise ValueError(f"unknown action {action!r} on importance weights; choose truncate or mask")


def vetoed_sequences(
    train_logprobs: Float[Tensor, " tokens"],
    rollout_logprobs: Float[Tensor, " tokens"],
    sequence: Int[Tensor, " tokens"],
    least: float,
) -> Bool[Tensor, " sequences"]:
    """Sequences with any token whose ratio train / rollout lies below `least` (1e-4, say): one such token says that the
    trainer scored something else than was sampled."""
    below = ((train_logprobs - rollout_logprobs).detach() < math.log(least)).to(train_logprobs.dtype)
    return sequence_max(below, sequence) > 0


def effective_sample_size(total: float, squares: float, count: float) -> float:
    """(sum w)^2 / (n sum w^2), a share in [0, 1]: 1 for equal weights, 1 / n where one carries all. From the sums, so
    that parts of a batch may be added up first. 0 where no weight is left."""
    return total * total / (count * squares) if count > 0 and squares > 0 else 0.0
