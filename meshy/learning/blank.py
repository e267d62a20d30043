"""What stands in a column where there is nothing: at a token that nobody was to score, NaN, or -1 where the column is
of whole numbers; where there is no token, an empty tensor of the column's type."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meshy.columns import Column


def without_tokens(column: Column) -> Tensor:
    """[0], or [0, 0] where a token has several entries."""
    return torch.zeros((0, 0) if column.kind == "jagged2d" else (0,), dtype=getattr(torch, column.dtype))


def filled(column: Column, rows: Sequence[Tensor | None], lengths: Sequence[int]) -> list[Tensor]:
    """The rows of a jagged column, with such tokens in place of those that are None. lengths: tokens of each."""
    dtype = getattr(torch, column.dtype)
    value = torch.tensor(math.nan if dtype.is_floating_point else -1).to(dtype)
    if column.kind == "jagged2d":
        value = value.expand(next((row.shape[1] for row in rows if row is not None), 1))
    return [
        value.expand(length, *value.shape) if row is None else row for row, length in zip(rows, lengths, strict=True)
    ]
