"""The clipped loss of PPO (arXiv 1707.06347), with a bound of its own above (2503.14476) and dual clip (1912.09729)."""

from jaxtyping import Bool, Float
from torch import Tensor

from meshy.algorithms.aggregation import aggregate
from meshy.algorithms.interface import LossConfig, LossInputs, LossOutput, vanishes_at_zero_advantage
from meshy.algorithms.kl import kl_estimate
from meshy.algorithms.options import options_of
from meshy.algorithms.ratios import bounded_ratio, clipped_surrogate


@vanishes_at_zero_advantage
def ppo_clip_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """The clipped surrogate, aggregated as `config.aggregation` says.

    Metrics (token sums): `clip_fraction`, `ppo_kl` (k3 of the new policy against the old one).
    """
    options_of(config, "ppo_clip_loss")  # it has none
    token_loss, clipped = ppo_clip_token_loss(
        inputs.logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    loss = aggregate(token_loss, inputs.sequence, inputs.counts, config.aggregation, config.aggregation_constant)
    kl = kl_estimate(inputs.old_logprobs, inputs.logprobs.detach(), "k3")
    return LossOutput(loss=loss, metrics={"clip_fraction": clipped.sum(), "ppo_kl": kl.sum()})


def ppo_clip_token_loss(
    logprobs: Float[Tensor, " tokens"],
    old_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)) with rho = exp(logprob - old), and where the clip bound.

    With `dual_clip` = c, tokens of negative advantage are bounded by -A c as well. The log-ratio is clamped to +-20.
    """
    ratio = bounded_ratio(logprobs - old_logprobs)
    return clipped_surrogate(ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
