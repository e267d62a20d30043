"""Whether numbers can be learnt from."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def check_numbers(what: str, given: Tensor, like: Tensor) -> None:
    """ValueError where an estimator did not give one finite number for each of `like`."""
    check_shape(what, given, like)
    if not bool(given.isfinite().all()):
        raise ValueError(
            f"the recipe's estimator gave {what} that are NaN or infinite; nothing can be learnt from them"
        )


def check_shape(what: str, given: Tensor, like: Tensor) -> None:
    """ValueError where an estimator did not give one number for each of `like`."""
    if given.shape != like.shape:
        raise ValueError(
            f"the recipe's estimator gave {what} of shape {list(given.shape)} where {list(like.shape)} were asked for"
        )


def numbers_of(values: Sequence[float | None]) -> Float[Tensor, " samples"]:
    """A column of numbers, float32; NaN where a row has none."""
    return torch.tensor([float("nan") if value is None else float(value) for value in values], dtype=torch.float32)


def rewards_of(name: str, values: Sequence[float | None], uids: Sequence[str]) -> Float[Tensor, " samples"]:
    """The same of a column that is added to the reward. Raises ValueError naming the row whose number is NaN or
    infinite; that it has none is no fault."""
    numbers = numbers_of(values)
    for uid, value, number in zip(uids, values, numbers.tolist(), strict=True):
        if value is not None and not abs(number) < float("inf"):
            raise ValueError(f"row {uid}: its {name} is {value}; a reward must be a finite number")
    return numbers
