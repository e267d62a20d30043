"""Which rank trains which samples, and in which micro-batches. Pure arithmetic on lengths; the same on every rank."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

FORWARD, FORWARD_AND_BACKWARD = 1, 3  # what they cost, relative to one another

MicroBatchPlan = tuple[int, ...]
"""Sample numbers of one micro-batch."""


@dataclass(frozen=True)
class MiniBatchPlan:
    """One optimiser step.

    trained: for each rank its micro-batches; every rank has the same number of them, at least one, some perhaps empty,
    because forward and backward are collective. scored: the same for samples that have no gradient: they only pass
    forward, for the metrics. tokens, sequences: the global denominators (see algorithms.interface.GlobalCounts).
    """

    trained: tuple[tuple[MicroBatchPlan, ...], ...]
    scored: tuple[tuple[MicroBatchPlan, ...], ...]
    tokens: int
    sequences: int

    def of(self, rank: int) -> tuple[MicroBatchPlan, ...]:
        """Every micro-batch of a rank."""
        return (*self.trained[rank], *self.scored[rank])


def plan_mini_batch(
    samples: Sequence[int],
    lengths: Sequence[int],
    written: Sequence[int],
    *,
    world_size: int,
    tokens_per_micro_batch: int,
    packed: bool,
    only_score: Collection[int] = (),
) -> MiniBatchPlan:
    """Spread `samples` (numbers into `lengths`) over ranks by tokens, then cut each rank's share into micro-batches.

    lengths: tokens of each sample. written: how many of them the policy wrote. only_score: samples without a gradient.
    A micro-batch holds at most `tokens_per_micro_batch` tokens, padding included, unless a single sample is longer.
    """
    idle = set(only_score)
    load = [0] * world_size

    def cut(chosen: Sequence[int], cost: int, least: int) -> tuple[tuple[MicroBatchPlan, ...], ...]:
        shares: list[list[int]] = [[] for _ in range(world_size)]
        for sample in sorted(chosen, key=lambda i: -lengths[i]):  # the longest first, each to the least loaded rank
            rank = load.index(min(load))
            shares[rank].append(sample)
            load[rank] += cost * lengths[sample]
        batches = [micro_batches(share, lengths, tokens_per_micro_batch, packed) for share in shares]
        most = max(least, *(len(some) for some in batches))
        return tuple(tuple(some) + ((),) * (most - len(some)) for some in batches)

    return MiniBatchPlan(
        trained=cut([i for i in samples if i not in idle], FORWARD_AND_BACKWARD, 1),
        scored=cut([i for i in samples if i in idle], FORWARD, 0),
        tokens=sum(written[i] for i in samples),
        sequences=sum(written[i] > 0 for i in samples),
    )


def micro_batches(samples: Sequence[int], lengths: Sequence[int], budget: int, packed: bool) -> list[MicroBatchPlan]:
    """Samples of similar length together (little padding), each micro-batch within the budget."""
    batches: list[list[int]] = []
    width = used = 0
    for sample in sorted(samples, key=lambda i: -lengths[i]):
        length = lengths[sample]
        if batches and (used + length if packed else (len(batches[-1]) + 1) * width) <= budget:
            batches[-1].append(sample)
            used += length
        else:
            batches.append([sample])
            width = used = length
    return [tuple(batch) for batch in batches]


def mini_batches(order: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """`count` parts of `order` of equal size, give or take one."""
    if not 1 <= count <= max(len(order), 1):
        raise ValueError(f"{len(order)} samples cannot be cut into {count} mini-batches")
    edges = [len(order) * i // count for i in range(count + 1)]
    return [tuple(order[start:end]) for start, end in pairwise(edges)]
