"""GSPO (arXiv 2507.18071): the ratio that is clipped is that of the whole sequence, per token."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from meshy.algorithms.aggregation import aggregate
from meshy.algorithms.interface import LossConfig, LossInputs, LossOutput, vanishes_at_zero_advantage
from meshy.algorithms.kl import kl_estimate
from meshy.algorithms.options import options_of
from meshy.algorithms.ratios import bounded_ratio, clipped_surrogate
from meshy.algorithms.sequences import sequence_mean


@vanishes_at_zero_advantage
def gspo_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """The clipped surrogate of sequence ratios. The paper's settings: aggregation `seq-mean-token-mean`, clip_low 3e-4,
    clip_high 4e-4; a mean over tokens varies far less than one token does.

    Metrics (token sums): `clip_fraction`, `ppo_kl` (k3 of the new policy against the old one).
    """
    options_of(config, "gspo_loss")  # it has none
    token_loss, clipped = gspo_token_loss(
        inputs.logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        inputs.sequence,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    loss = aggregate(token_loss, inputs.sequence, inputs.counts, config.aggregation, config.aggregation_constant)
    kl = kl_estimate(inputs.old_logprobs, inputs.logprobs.detach(), "k3")
    return LossOutput(loss=loss, metrics={"clip_fraction": clipped.sum(), "ppo_kl": kl.sum()})


def gspo_token_loss(
    logprobs: Float[Tensor, " tokens"],
    old_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    sequence: Int[Tensor, " tokens"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """The clipped surrogate with rho_t = sg[s] exp(lp_t - sg[lp_t]), and where the clip bound.

    s = exp(mean of lp - old over the sequence), its exponent clamped to +-20; sg stops gradients. So rho is s by value,
    and each token has its own gradient, -A_t s where the clip does not bind.
    """
    mean = sequence_mean((logprobs - old_logprobs).detach(), sequence)
    ratio = bounded_ratio(mean[sequence] + (logprobs - logprobs.detach()))  # the difference is exactly 0
    return clipped_surrogate(ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
