"""DPPO (arXiv 2602.04879) by binary total variation: differences of probabilities, not ratios, mask tokens."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from meshy.algorithms.aggregation import aggregate
from meshy.algorithms.interface import LossConfig, LossInputs, LossOutput
from meshy.algorithms.kl import kl_estimate
from meshy.algorithms.options import options_of
from meshy.algorithms.ratios import bounded_ratio


def dppo_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """-keep A rho + kl_tau (lp - inf)^2, where rho = exp(lp - inf) and inf is the inference engine's log-prob of the
    token (rollout_logprobs): it corrects for staleness and for the mismatch of the engines at once. old_logprobs and
    the clip settings are not used.

    Options: tv_low (0.2), tv_high (0.2), kl_tau (1e-3; the penalty holds every token, whatever its advantage).

    Metrics (token sums): `dppo_dropped`, tokens that are not kept; `ppo_kl` (k3 of the new policy against inference).
    """
    token_loss, dropped = dppo_token_loss(
        inputs.logprobs,
        inputs.rollout_logprobs,
        inputs.advantages,
        **options_of(config, "dppo_loss", tv_low=0.2, tv_high=0.2, kl_tau=1e-3),
    )
    loss = aggregate(token_loss, inputs.sequence, inputs.counts, config.aggregation, config.aggregation_constant)
    kl = kl_estimate(inputs.rollout_logprobs, inputs.logprobs.detach(), "k3")
    return LossOutput(loss=loss, metrics={"dppo_dropped": dropped.sum(), "ppo_kl": kl.sum()})


def dppo_token_loss(
    logprobs: Float[Tensor, " tokens"],
    inference_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    *,
    tv_low: float,
    tv_high: float,
    kl_tau: float,
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """-keep A exp(lp - inf) + kl_tau (lp - inf)^2, and where a token is not kept.

    Dropped are tokens that have moved far enough the way their advantage pushes: A > 0 and p - p_inf > tv_high, or
    A <= 0 and p - p_inf < -tv_low. A token of a small probability may so change it many times over. The exponent is
    clamped to +-20; the penalty is not.
    """
    difference = logprobs - inference_logprobs
    moved = logprobs.detach().exp() - inference_logprobs.exp()
    dropped = torch.where(advantages > 0, moved > tv_high, moved < -tv_low)
    surrogate = torch.where(dropped, 0, -advantages * bounded_ratio(difference))
    return surrogate + kl_tau * difference.square(), dropped
