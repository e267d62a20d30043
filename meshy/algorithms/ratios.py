"""Ratios of probabilities between two policies, and the surrogate that is clipped by them."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# exp() of a larger log-ratio overflows in fp32 once multiplied; so far off policy the exact value has no meaning.
MAX_LOG_RATIO = 20.0


def bounded_ratio(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """exp(log_ratio), with the exponent clamped to +-20; beyond, it has no gradient."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(
    ratio: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)), to be minimised, and where the clip bound.

    With `dual_clip` = c, tokens of negative advantage are bounded by -A c as well.
    """
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, bounded)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    return loss, bounded > plain
