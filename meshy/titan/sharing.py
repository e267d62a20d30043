"""Samples over ranks by what they cost, and each rank's in micro-batches of so many tokens. Pure arithmetic on lengths;
the same on every rank."""

from collections.abc import Mapping, Sequence

EVEN_WITHIN = 0.02

MicroBatchPlan = tuple[int, ...]
"""Sample numbers of one micro-batch."""


def spread(costs: Mapping[int, int], world_size: int, load: Sequence[int] = ()) -> dict[int, int]:
    """A rank for each sample: the dearest first, each to the least loaded rank. load: what each has already."""
    loads = list(load) or [0] * world_size
    home = {}
    for sample in sorted(costs, key=lambda i: -costs[i]):
        home[sample] = rank = loads.index(min(loads))
        loads[rank] += costs[sample]
    return home


def even_out(home: Mapping[int, int], costs: Mapping[int, int], world_size: int) -> dict[int, int]:
    """The same ranks, but for a few samples that move from the most to the least loaded one, until no move helps or the
    load is even to EVEN_WITHIN of a rank's."""
    home = dict(home)
    load = [0] * world_size
    for sample, rank in home.items():
        load[rank] += costs[sample]
    tolerance = EVEN_WITHIN * sum(load) / world_size
    while (gap := max(load) - min(load)) > tolerance:
        most, least = load.index(max(load)), load.index(min(load))
        movable = [i for i, rank in home.items() if rank == most and 0 < costs[i] < gap]
        if not movable:
            break
        sample = min(movable, key=lambda i: (abs(costs[i] - gap / 2), i))
        home[sample] = least
        load[most] -= costs[sample]
        load[least] += costs[sample]
    return home


def cut_shares(
    chosen: Sequence[int],
    home: Mapping[int, int],
    lengths: Sequence[int],
    world_size: int,
    budget: int,
    packed: bool,
    least: int = 0,
) -> tuple[tuple[MicroBatchPlan, ...], ...]:
    """For each rank the micro-batches of its samples; every rank has equally many, at least `least`, some perhaps
    empty, because what is done with them is collective. home: the rank of each sample."""
    shares: list[list[int]] = [[] for _ in range(world_size)]
    for sample in chosen:
        shares[home[sample]].append(sample)
    batches = [micro_batches(share, lengths, budget, packed) for share in shares]
    most = max(least, *(len(some) for some in batches))
    return tuple(tuple(some) + ((),) * (most - len(some)) for some in batches)


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
