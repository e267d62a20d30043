"""The order in which a run uses its prompts: a pure function of (length, seed, position). Torch-free."""

from __future__ import annotations

import random
from functools import lru_cache


class DataOrder:
    """Maps the run's prompt positions 0, 1, 2 ... to rows of the dataset, without end.

    Each epoch of `length` positions is a fresh permutation, drawn from the seed and the epoch's number alone: whoever
    asks, in whichever order, gets the same rows, and a resumed run goes on where it was.
    """

    def __init__(self, length: int, seed: int) -> None:
        if length < 1:
            raise ValueError("the dataset is empty: there is no prompt to train on")
        self.length, self.seed = length, seed

    def epoch(self, position: int) -> int:
        """How often the dataset was used up before this position."""
        return position // self.length

    def index(self, position: int) -> int:
        """The row at this position."""
        if position < 0:
            raise ValueError(f"a position in the data order is never negative: got {position}")
        epoch, offset = divmod(position, self.length)
        return _permutation(self.length, self.seed, epoch)[offset]


@lru_cache(maxsize=4)  # replacements of lost groups are of later epochs than what is started beside them
def _permutation(length: int, seed: int, epoch: int) -> list[int]:
    rows = list(range(length))
    random.Random(f"{seed}:{epoch}").shuffle(rows)
    return rows
