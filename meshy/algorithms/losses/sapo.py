"""SAPO (arXiv 2511.20347): a smooth gate round the ratio 1 instead of a clip."""

import torch
from jaxtyping import Float
from torch import Tensor

from meshy.algorithms.aggregation import aggregate
from meshy.algorithms.interface import LossConfig, LossInputs, LossOutput, vanishes_at_zero_advantage
from meshy.algorithms.kl import kl_estimate
from meshy.algorithms.options import OptionError, options_of
from meshy.algorithms.ratios import bounded_ratio


@vanishes_at_zero_advantage
def sapo_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """-A (4 / tau) sigmoid(tau (rho - 1)). The paper aggregates by `seq-mean-token-mean`. Clip settings are not used.

    Options: tau_pos (1.0), for positive advantages, and tau_neg (1.05), for the others; the larger, the sooner the
    gradient fades away from the old policy.

    Metrics (token sums): `ppo_kl` (k3 of the new policy against the old one).
    """
    token_loss = sapo_token_loss(
        inputs.logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        **options_of(config, "sapo_loss", tau_pos=1.0, tau_neg=1.05),
    )
    loss = aggregate(token_loss, inputs.sequence, inputs.counts, config.aggregation, config.aggregation_constant)
    kl = kl_estimate(inputs.old_logprobs, inputs.logprobs.detach(), "k3")
    return LossOutput(loss=loss, metrics={"ppo_kl": kl.sum()})


def sapo_token_loss(
    logprobs: Float[Tensor, " tokens"],
    old_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    *,
    tau_pos: float,
    tau_neg: float,
) -> Float[Tensor, " tokens"]:
    """-A (4 / tau) sigmoid(tau (rho - 1)) with rho = exp(lp - old), tau = tau_pos where A > 0 and tau_neg elsewhere.

    At rho = 1 the gradient is that of plain REINFORCE, -A. The log-ratio is clamped to +-20.
    """
    if tau_pos <= 0 or tau_neg <= 0:
        name = "tau_pos" if tau_pos <= 0 else "tau_neg"
        raise OptionError(name, f"sapo_loss: tau_pos and tau_neg must be positive, got {tau_pos} and {tau_neg}")
    ratio = bounded_ratio(logprobs - old_logprobs)
    tau = torch.full_like(ratio, tau_neg).masked_fill(advantages > 0, tau_pos)
    return -advantages * (4 / tau) * (tau * (ratio - 1)).sigmoid()
