"""Which example stands at which position of the data order: a fresh permutation for every epoch. Pure."""

from __future__ import annotations

import random


class DataOrder:
    """The order in which `length` examples are used, epoch after epoch, the same for the same `seed`.

    Each epoch holds every example exactly once. Positions may be asked for in any order; the two epochs asked for last
    are kept. ValueError for a length below 1.
    """

    def __init__(self, length: int, seed: int) -> None:
        if length < 1:
            raise ValueError(f"a data order needs at least one example, got {length}")
        self._length = length
        self._seed = seed
        self._epochs: dict[int, list[int]] = {}

    def index(self, position: int) -> int:
        """The row of the example at `position` (0, 1, 2 ... without end)."""
        if position < 0:
            raise IndexError(f"a position is 0 or more, got {position}")
        epoch, place = divmod(position, self._length)
        if epoch not in self._epochs:
            while len(self._epochs) > 1:
                del self._epochs[min(self._epochs)]
            rows = list(range(self._length))
            random.Random(f"{self._seed}/{epoch}").shuffle(rows)
            self._epochs[epoch] = rows
        return self._epochs[epoch][place]
