"""Whether an estimator gave numbers that can be learnt from."""

from torch import Tensor


def check_numbers(what: str, given: Tensor, like: Tensor) -> None:
    """ValueError where an estimator did not give one finite number for each of `like`."""
    if given.shape != like.shape:
        raise ValueError(
            f"the recipe's estimator gave {what} of shape {list(given.shape)} where {list(like.shape)} were asked for"
        )
    if not bool(given.isfinite().all()):
        raise ValueError(
            f"the recipe's estimator gave {what} that are NaN or infinite; nothing can be learnt from them"
        )
