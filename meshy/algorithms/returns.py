"""Sums of what is still to come, along the tokens of each sequence."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from meshy.algorithms.sequences import sequence_lengths


def discounted_sum(
    values: Float[Tensor, " tokens"], sequence: Int[Tensor, " tokens"], factor: float
) -> Float[Tensor, " tokens"]:
    """y_t = x_t + factor * y_{t+1} within each sequence (ascending numbers), with y = 0 beyond its end; float64.

    Every pass doubles how far the sums reach, so there are log2(longest sequence) of them.
    """
    if not 0 <= factor <= 1:
        raise ValueError(f"a discount must be at least 0 and at most 1, got {factor}")
    sums = values.double()
    longest, reach = int(sequence_lengths(sequence).max()) if sequence.numel() else 0, 1
    while reach < longest:
        same = sequence[reach:] == sequence[:-reach]
        further = factor**reach * torch.where(same, sums[reach:], 0)
        sums = torch.cat([sums[:-reach] + further, sums[-reach:]])
        reach *= 2
    return sums


def following(values: Float[Tensor, " tokens"], sequence: Int[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """The value at the next token of the same sequence; 0 at its last token."""
    result = torch.zeros_like(values)
    result[:-1] = torch.where(sequence[1:] == sequence[:-1], values[1:], 0)
    return result
