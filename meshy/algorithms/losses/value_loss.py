"""The critic's loss: squared error, clipped round the values that advantages were made from (arXiv 2005.12729)."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def value_loss(
    values: Float[Tensor, " tokens"],
    old_values: Float[Tensor, " tokens"],
    returns: Float[Tensor, " tokens"],
    clip: float | None = None,
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """0.5 max((v - G)^2, (clip(v, v_old - clip, v_old + clip) - G)^2) of each token, and where the clip bound.

    values: of the critic being trained, with gradient; old_values: as they stood when returns were made. clip: in units
    of the reward; None for plain halved squares. Aggregate with `GlobalCounts`, as policy losses are.
    """
    plain = (values - returns).square()
    if clip is None:
        return plain / 2, torch.zeros_like(plain, dtype=torch.bool)
    if clip < 0:
        raise ValueError(f"value_loss: clip must be 0 or more, or None for no clipping, got {clip}")
    bounded = (torch.clamp(values, old_values - clip, old_values + clip) - returns).square()
    return torch.maximum(plain, bounded) / 2, bounded > plain
