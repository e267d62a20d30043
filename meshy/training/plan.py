"""Which rank trains which samples, and in which micro-batches. Pure arithmetic on lengths; the same on every rank."""

import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshy.titan.sharing import MicroBatchPlan, cut_shares, even_out, spread

FORWARD, FORWARD_AND_BACKWARD = 1, 3  # what they cost, relative to one another
SCORED_OF = 8  # of so many samples without a gradient, one passes forward for the metrics


@dataclass(frozen=True)
class MiniBatchPlan:
    """One optimiser step.

    trained: for each rank its micro-batches; every rank has the same number of them, at least one, some perhaps empty,
    because forward and backward are collective. scored: the same for some of the samples that have no gradient: they
    only pass forward, for the metrics, where each token counts `scored_weight` times, for the others. resting: for each
    rank these others. tokens, sequences: the global denominators (see algorithms.interface.GlobalCounts).
    """

    trained: tuple[tuple[MicroBatchPlan, ...], ...]
    scored: tuple[tuple[MicroBatchPlan, ...], ...]
    resting: tuple[tuple[int, ...], ...]
    scored_weight: float
    tokens: int
    sequences: int

    def of(self, rank: int) -> tuple[MicroBatchPlan, ...]:
        """Every micro-batch of a rank."""
        return (*self.trained[rank], *self.scored[rank])

    def samples(self, rank: int) -> set[int]:
        """Every sample of a rank."""
        return {sample for members in (*self.of(rank), self.resting[rank]) for sample in members}


def plan_mini_batch(
    samples: Sequence[int],
    lengths: Sequence[int],
    written: Sequence[int],
    *,
    world_size: int,
    tokens_per_micro_batch: int,
    packed: bool,
    without_gradient: Collection[int] = (),
    scored_of: int = SCORED_OF,
    ranks: Sequence[int] | None = None,
) -> MiniBatchPlan:
    """Spread `samples` (numbers into `lengths`) over ranks by tokens, then cut each rank's share into micro-batches.

    lengths: tokens of each sample. written: how many of them the policy wrote. without_gradient: samples of which one
    in `scored_of` is scored, and the others rest. ranks: of each sample, the rank that has it already; only as many go
    elsewhere as an even load asks for. A micro-batch holds at most `tokens_per_micro_batch` tokens, padding included,
    unless a single sample is longer.
    """
    without = set(without_gradient)
    trained = [i for i in samples if i not in without]
    idle = [i for i in samples if i in without]
    scored = idle[::scored_of]
    costs = dict.fromkeys(samples, 0)
    costs |= {i: lengths[i] * FORWARD_AND_BACKWARD for i in trained} | {i: lengths[i] * FORWARD for i in scored}
    if ranks is None:
        home = spread(costs, world_size)
    else:
        home = even_out({i: ranks[i] for i in samples}, costs, world_size)

    def cut(chosen: Sequence[int], least: int) -> tuple[tuple[MicroBatchPlan, ...], ...]:
        return cut_shares(chosen, home, lengths, world_size, tokens_per_micro_batch, packed, least)

    seen = sum(written[i] for i in scored)
    resting = set(idle).difference(scored)
    return MiniBatchPlan(
        trained=cut(trained, 1),
        scored=cut(scored, 0),
        resting=tuple(tuple(i for i in idle if home[i] == rank and i in resting) for rank in range(world_size)),
        scored_weight=sum(written[i] for i in idle) / seen if seen else 1.0,
        tokens=sum(written[i] for i in samples),
        sequences=sum(written[i] > 0 for i in samples),
    )


class Shares:
    """Which rank is to have a row, told when it comes. by_name: a function of the row's uid alone, so that a run
    repeats itself; else the rank that has been given the fewest tokens so far."""

    def __init__(self, world_size: int, by_name: bool) -> None:
        self._load = [0] * world_size
        self._by_name = by_name

    def rank_of(self, uid: str, length: int) -> int:
        if self._by_name:
            return zlib.crc32(uid.encode()) % len(self._load)
        rank = self._load.index(min(self._load))
        self._load[rank] += length
        return rank


def mini_batches(order: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """`count` parts of `order` of equal size, give or take one."""
    if not 1 <= count <= max(len(order), 1):
        raise ValueError(f"{len(order)} samples cannot be cut into {count} mini-batches")
    edges = [len(order) * i // count for i in range(count + 1)]
    return [tuple(order[start:end]) for start, end in pairwise(edges)]
