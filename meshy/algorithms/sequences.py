"""Sums, means and maxima over the tokens of each sequence of a micro-batch. A sequence without a token has 0."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def sequence_lengths(sequence: Int[Tensor, " tokens"]) -> Int[Tensor, " sequences"]:
    """Number of tokens of each sequence of the micro-batch."""
    return torch.bincount(sequence)


def sequence_sum(values: Float[Tensor, " tokens"], sequence: Int[Tensor, " tokens"]) -> Float[Tensor, " sequences"]:
    """Sum of the values of each sequence."""
    return values.new_zeros(sequence_lengths(sequence).numel()).index_add_(0, sequence, values)


def sequence_mean(values: Float[Tensor, " tokens"], sequence: Int[Tensor, " tokens"]) -> Float[Tensor, " sequences"]:
    """Mean of the values of each sequence."""
    return sequence_sum(values, sequence) / sequence_lengths(sequence).clamp(min=1)


def sequence_max(values: Float[Tensor, " tokens"], sequence: Int[Tensor, " tokens"]) -> Float[Tensor, " sequences"]:
    """Largest value of each sequence."""
    zeros = values.new_zeros(sequence_lengths(sequence).numel())
    return zeros.scatter_reduce_(0, sequence, values, "amax", include_self=False)
