"""The order in which a run uses its prompts: a pure function of (length, seed, position). Torch-free."""

from __future__ import annotations

import random


class DataOrder:
    """Maps the run's prompt positions 0, 1, 2 ... to rows of the dataset, without end.

    Each epoch of `length` positions is a fresh permutation, drawn from the seed and the epoch's number alone: whoever
    asks, in whichever order, gets the same rows, and a resumed run goes on where it was.
    """

    def __init__(self, length: int, seed: int) -> None:
        if length < 1:
            raise ValueError("the dataset is empty: there is no prompt to train on")
        self.length, self.seed = length, seed
        self._epoch, self._rows = -1, list[int]()

    def epoch(self, position: int) -> int:
        """How often the dataset was used up before this position."""
        return position // self.length

    def index(self, position: int) -> int:
        """The row at this position."""
        if position < 0:
            raise ValueError(f"a position in the data order is never negative: got {position}")
        epoch, offset = divmod(position, self.length)
        if epoch != self._epoch:
            rows = list(range(self.length))
            random.Random(f"{self.seed}:{epoch}").shuffle(rows)
            self._epoch, self._rows = epoch, rows
        return self._rows[offset]
