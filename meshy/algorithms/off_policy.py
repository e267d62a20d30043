"""All of a `Correction` at once: the factor by which each token's advantage is multiplied, and what to report of it."""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from meshy.algorithms.correction import Correction
from meshy.algorithms.importance import bounded_weights, importance_ratios, vetoed_sequences
from meshy.algorithms.opsm import opsm_keep
from meshy.algorithms.rejection import rejection_keep


def off_policy_factor(
    correction: Correction,
    *,
    logprobs: Float[Tensor, " tokens"],
    train_logprobs: Float[Tensor, " tokens"],
    rollout_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    sequence: Int[Tensor, " tokens"],
) -> tuple[Float[Tensor, " tokens"], Mapping[str, Tensor]]:
    """Weight times keep of each token, 0 or more and finite, detached; and sums over this micro-batch.

    logprobs: under the weights being trained. train_logprobs: the trainer's, by which ratios to the rollout's are
    taken. Sums over tokens: `weight` and `weight_squared` of the factor; `dropped`, those of factor 0 by any rule; and,
    of each rule in force, its own: `truncated` or `masked` by the bounds of importance weights, `rejected`, `opsm`.
    Over sequences: `vetoed`.
    """
    train, rollout = train_logprobs.detach(), rollout_logprobs
    factor = torch.ones_like(rollout)
    keep = torch.ones_like(rollout, dtype=torch.bool)
    sums: dict[str, Tensor] = {}
    if correction.importance is not None:
        ratios = importance_ratios(train, rollout, sequence, correction.importance)
        factor, within = bounded_weights(ratios, correction.action, correction.low, correction.high)
        name = "truncated" if correction.action == "truncate" else "masked"
        keep, sums[name] = keep & within, ((factor != ratios) | ~within).sum()
    if correction.veto is not None:
        vetoed = vetoed_sequences(train, rollout, sequence, correction.veto)
        keep, sums["vetoed"] = keep & ~vetoed[sequence], vetoed.sum()
    if correction.reject is not None:
        near = rejection_keep(
            train,
            rollout,
            sequence,
            statistic=correction.reject,
            low=correction.reject_low,
            high=correction.reject_high,
        )
        keep, sums["rejected"] = keep & near, (~near).sum()
    if correction.opsm is not None:
        trusted = opsm_keep(logprobs, rollout, advantages, sequence, correction.opsm)
        keep, sums["opsm"] = keep & trusted, (~trusted).sum()
    factor = torch.where(keep, factor, 0)
    return factor, {
        "weight": factor.sum(),
        "weight_squared": factor.double().square().sum(),
        "dropped": (~keep).sum(),
        **sums,
    }
