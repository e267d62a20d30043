"""The dense key/value cache: one slot per running request, its keys from position 0 on."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float, Int64
from torch import Tensor

from meshy.inference.embedded.batch import round_up

KEY_MULTIPLE = 32  # attention always reads a multiple of this many keys; see `attention`


class SlotCache:
    """Per layer, keys and values [slots, kv_heads, positions, head_dim], allocated when first written.

    Positions grow by doubling up to `max_length`, so that short runs on a long-context model stay small.
    What lies beyond a request's length is finite (zeros or an earlier request's) and is never attended to.
    """

    def __init__(self, slots: int, max_length: int) -> None:
        self.slots = slots
        self.limit = round_up(max_length, KEY_MULTIPLE)
        self.length = 0
        self.keys: dict[int, Float[Tensor, "slots heads positions dim"]] = {}
        self.values: dict[int, Float[Tensor, "slots heads positions dim"]] = {}

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for store in (self.keys, self.values) for t in store.values())

    @property
    def capacity(self) -> int:
        """Tokens that fit in when every slot is full."""
        return self.slots * self.limit

    def reserve(self, length: int) -> None:
        """Make room for `length` positions in every slot."""
        if length <= self.length:
            return
        self.length = min(self.limit, max(round_up(length, KEY_MULTIPLE), 2 * self.length))
        for store in (self.keys, self.values):
            for layer, old in store.items():
                new = old.new_zeros(self.slots, old.shape[1], self.length, old.shape[3])
                new[:, :, : old.shape[2]] = old
                store[layer] = new

    def write(
        self,
        layer: int,
        index: Int64[Tensor, " heads*writes"],
        key: Float[Tensor, "heads*writes dim"],
        value: Float[Tensor, "heads*writes dim"],
        heads: int,
    ) -> None:
        """Store rows at flat places `index` = (slot * heads + head) * positions + position."""
        for store, rows in ((self.keys, key), (self.values, value)):
            if layer not in store:
                store[layer] = rows.new_zeros(self.slots, heads, self.length, rows.shape[-1])
            store[layer].view(-1, rows.shape[-1]).index_copy_(0, index, rows)

    def move(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """Copy the first `length` positions of slots to other slots: (from, to) pairs, no slot in both roles."""
        sources, targets = zip(*moves, strict=True)
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[list(targets), :, :length] = tensor[list(sources), :, :length]

    def clear(self) -> None:
        """Give the memory back."""
        self.keys.clear()
        self.values.clear()
        self.length = 0
