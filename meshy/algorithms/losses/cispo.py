"""CISPO (MiniMax-M1, arXiv 2506.13585): REINFORCE with a clipped importance weight; no token loses its gradient."""

from jaxtyping import Bool, Float
from torch import Tensor

from meshy.algorithms.aggregation import aggregate
from meshy.algorithms.interface import LossConfig, LossInputs, LossOutput, vanishes_at_zero_advantage
from meshy.algorithms.kl import kl_estimate
from meshy.algorithms.options import options_of
from meshy.algorithms.ratios import bounded_ratio


@vanishes_at_zero_advantage
def cispo_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """-sg[clip(rho, 1 - clip_low, 1 + clip_high)] A lp. The paper bounds from above only: clip_low of 1 or more.
    `dual_clip` is not used.

    Metrics (token sums): `clip_fraction`, `ppo_kl` (k3 of the new policy against the old one).
    """
    options_of(config, "cispo_loss")  # it has none
    token_loss, clipped = cispo_token_loss(
        inputs.logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )
    loss = aggregate(token_loss, inputs.sequence, inputs.counts, config.aggregation, config.aggregation_constant)
    kl = kl_estimate(inputs.old_logprobs, inputs.logprobs.detach(), "k3")
    return LossOutput(loss=loss, metrics={"clip_fraction": clipped.sum(), "ppo_kl": kl.sum()})


def cispo_token_loss(
    logprobs: Float[Tensor, " tokens"],
    old_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """-sg[clip(rho, 1 - clip_low, 1 + clip_high)] A lp with rho = exp(lp - old), and where the weight was clipped.

    sg stops gradients: that of lp is the clipped weight times -A, on whichever side of the clip. The log-ratio is
    clamped to +-20.
    """
    ratio = bounded_ratio((logprobs - old_logprobs).detach())
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs, weight != ratio
