"""Whitening over the valid entries of a batch (as in REINFORCE++, arXiv 2501.03262)."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

EPS = 1e-8


def masked_whiten(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """(x - mean) / sqrt(unbiased variance + 1e-8) over the entries where mask holds; 0 elsewhere.

    Fewer than two valid entries have no variance: the result is 0 everywhere.
    """
    count = mask.sum()
    if count < 2:
        return torch.zeros_like(x)
    kept = torch.where(mask, x, 0)
    centred = torch.where(mask, x - kept.sum() / count, 0)
    variance = centred.square().sum() / (count - 1)
    return centred / (variance + EPS).sqrt()
