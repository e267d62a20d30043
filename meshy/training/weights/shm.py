"""Weights through shared memory: a bucket lies in a segment that replicas of this host map; only its name travels."""

from collections.abc import Mapping

from torch import Tensor

from meshy.generation import commands
from meshy.generation.shared_tensors import ALIGNMENT, SharedSegment
from meshy.training.weights.bracket import Bracket
from meshy.training.weights.buckets import Bucket, Halves, Unpacked


class Shm:
    """ranks: how many processes of each replica load the tensors. size: bytes of the segment, kept over publishes."""

    mode = "shm"
    align = ALIGNMENT
    unpacked: Unpacked | None = None  # a segment's bytes are all that replicas see

    def __init__(self, ranks: Mapping[str, int], size: int) -> None:
        self.memory = Halves(self._allocate, size)
        self._ranks = ranks
        self._segment: SharedSegment | None = None

    def _allocate(self, size: int) -> Tensor:
        self._segment = None  # a smaller one before; shared memory may have no room for both
        self._segment = SharedSegment(size)
        return self._segment.bytes

    async def open(self, bracket: Bracket) -> None:
        """Nothing to prepare."""

    async def send(self, bracket: Bracket, bucket: Bucket, version: int | None) -> None:
        """Every living replica loads the bucket. version: of the weights, where the bucket completes them."""
        if not bracket.living:
            return
        assert self._segment is not None
        payload = self._segment.payload(bucket.tensors, receivers=sum(self._ranks[url] for url in bracket.living))
        await bracket.each(
            {
                url: commands.update_from_tensor([payload] * self._ranks[url], version, flush=bracket.flush)
                for url in bracket.living
            }
        )

    async def close(self) -> None:
        """Nothing to leave."""
