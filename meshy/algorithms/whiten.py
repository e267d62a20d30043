"""Whitening over the valid entries of a batch (as in REINFORCE++, arXiv 2501.03262)."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

EPS = 1e-8


def whiten(
    x: Float[Tensor, " entries"], total: Callable[[Tensor], Tensor] = lambda values: values
) -> Float[Tensor, " entries"]:
    """(x - mean) / sqrt(unbiased variance + 1e-8), both over the entries of all ranks; computed in float64.

    total: the sum of a small CPU tensor over all ranks (see TokenInputs); called twice, also by a rank that has no
    entry. Fewer than two entries on all ranks have no variance: the result is 0.
    """
    wide = x.double()
    count, sum_ = total(torch.stack([wide.new_tensor(float(wide.numel())), wide.sum()]).cpu()).tolist()
    centred = wide - sum_ / max(count, 1)
    squares = total(centred.square().sum().reshape(1).cpu()).item()
    if count < 2:
        return torch.zeros_like(x)
    return (centred / (squares / (count - 1) + EPS) ** 0.5).to(x.dtype)


def masked_whiten(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The entries where mask holds, whitened among themselves; 0 elsewhere."""
    result = torch.zeros_like(x)
    result[mask] = whiten(x[mask])
    return result
