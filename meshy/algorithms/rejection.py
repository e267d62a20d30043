"""Rejection of tokens or whole sequences by how far the trainer is from the inference engine (masked importance
sampling, as in verl's `rollout_rs`)."""

import math
from typing import get_args

from jaxtyping import Bool, Float, Int
from torch import Tensor

from meshy.algorithms.correction import Statistic
from meshy.algorithms.kl import kl_estimate
from meshy.algorithms.sequences import sequence_max, sequence_mean, sequence_sum

REDUCTIONS = {"seq_mean": sequence_mean, "seq_sum": sequence_sum, "seq_max": sequence_max}


def rejection_statistic(
    train_logprobs: Float[Tensor, " tokens"],
    rollout_logprobs: Float[Tensor, " tokens"],
    sequence: Int[Tensor, " tokens"],
    statistic: Statistic,
) -> Float[Tensor, " tokens"] | Float[Tensor, " sequences"]:
    """One value a token ("token_..."), or one a sequence (mean, sum or max over its tokens), nats. Detached.

    With d = train - rollout: k1 = d (signed: positive where the trainer finds the token likelier; verl's is -d),
    k2 = d^2 / 2, k3 = exp(d) - 1 - d, which estimates KL(rollout || train) and is never negative.
    """
    scope, kind = statistic.rsplit("_", 1)
    train, rollout = train_logprobs.detach(), rollout_logprobs.detach()
    if kind == "k1":
        values = train - rollout
    else:
        values = kl_estimate(rollout, train, kind)  # type: ignore[arg-type]
    if scope == "token":
        return values
    if scope not in REDUCTIONS:
        raise ValueError(f"unknown rejection statistic {statistic!r}; choose one of {', '.join(get_args(Statistic))}")
    return REDUCTIONS[scope](values, sequence)


def rejection_keep(
    train_logprobs: Float[Tensor, " tokens"],
    rollout_logprobs: Float[Tensor, " tokens"],
    sequence: Int[Tensor, " tokens"],
    *,
    statistic: Statistic,
    low: float | None = None,
    high: float | None = None,
) -> Bool[Tensor, " tokens"]:
    """Tokens whose statistic, or that of their sequence, lies in [low, high]; None is no bound."""
    value = rejection_statistic(train_logprobs, rollout_logprobs, sequence, statistic)
    inside = (value >= (-math.inf if low is None else low)) & (value <= (math.inf if high is None else high))
    return inside if statistic.startswith("token_") else inside[sequence]
