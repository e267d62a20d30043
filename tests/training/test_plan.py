from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshy.titan.sharing import EVEN_WITHIN, even_out, micro_batches
from meshy.training.plan import SCORED_OF, Shares, mini_batches, plan_mini_batch

lengths_of = st.lists(st.integers(1, 100), min_size=0, max_size=60)


@given(
    lengths=lengths_of,
    world=st.integers(1, 5),
    budget=st.integers(1, 400),
    packed=st.booleans(),
    idle=st.sets(st.integers(0, 60)),
)
def test_every_sample_has_one_place_within_the_budget_and_ranks_keep_in_step(lengths, world, budget, packed, idle):
    written = [length // 2 for length in lengths]
    idle &= set(range(len(lengths)))
    plan = plan_mini_batch(
        range(len(lengths)),
        lengths,
        written,
        world_size=world,
        tokens_per_micro_batch=budget,
        packed=packed,
        without_gradient=idle,
    )
    assert len(plan.trained) == len(plan.scored) == world
    assert len({len(batches) for batches in plan.trained}) == len({len(batches) for batches in plan.scored}) == 1
    assert len(plan.trained[0]) >= 1  # every rank runs backward, if only over nothing
    passed = Counter(sample for rank in range(world) for batch in plan.of(rank) for sample in batch)
    assert passed + Counter(sample for rank in plan.resting for sample in rank) == Counter(range(len(lengths)))
    assert sorted(sample for rank in range(world) for sample in plan.samples(rank)) == list(range(len(lengths)))
    scored = [sample for rank in plan.scored for batch in rank for sample in batch]
    assert set(scored) <= idle and len(scored) == -(-len(idle) // SCORED_OF)
    assert idle - set(scored) == {sample for rank in plan.resting for sample in rank}
    tokens_scored = sum(written[i] for i in scored)
    if tokens_scored:  # those that are scored stand for all
        assert plan.scored_weight * tokens_scored == pytest.approx(sum(written[i] for i in idle))
    for rank in range(world):
        for batch in plan.of(rank):
            sizes = [lengths[i] for i in batch]
            assert len(batch) <= 1 or (sum(sizes) if packed else len(sizes) * max(sizes)) <= budget
    assert plan.tokens == sum(written) and plan.sequences == sum(w > 0 for w in written)


@given(lengths=lengths_of, world=st.integers(1, 5))
def test_ranks_get_equal_tokens_up_to_one_sample(lengths, world):
    plan = plan_mini_batch(
        range(len(lengths)), lengths, lengths, world_size=world, tokens_per_micro_batch=100, packed=True
    )
    loads = [sum(lengths[i] for batch in rank for i in batch) for rank in plan.trained]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_padding_costs_little_because_similar_lengths_go_together():
    lengths = [10, 100, 11, 99, 12, 98, 9, 101] * 4
    batches = micro_batches(range(len(lengths)), lengths, budget=500, packed=False)
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
    assert padded < 1.2 * sum(lengths)


@given(st.lists(st.integers(), unique=True, max_size=40), st.integers(1, 10))
def test_mini_batches_are_equal_parts_in_order(order, count):
    if count > max(len(order), 1):
        with pytest.raises(ValueError, match="cannot be cut"):
            mini_batches(order, count)
        return
    parts = mini_batches(order, count)
    assert [sample for part in parts for sample in part] == order
    assert len(parts) == count and max(map(len, parts)) - min(map(len, parts)) <= 1


homes_of = st.integers(1, 5).flatmap(
    lambda world: st.tuples(
        st.just(world), st.lists(st.tuples(st.integers(0, world - 1), st.integers(1, 100)), max_size=60)
    )
)


def loads_of(home, costs, world) -> list[int]:
    return [sum(costs[i] for i, rank in home.items() if rank == r) for r in range(world)]


@given(homes_of)
def test_evening_out_loses_nothing_and_leaves_ranks_even_within_one_sample(drawn):
    world, samples = drawn
    home, costs = {i: rank for i, (rank, _) in enumerate(samples)}, {i: cost for i, (_, cost) in enumerate(samples)}
    even = even_out(home, costs, world)
    assert even.keys() == home.keys() and set(even.values()) <= set(range(world))
    before, after = loads_of(home, costs, world), loads_of(even, costs, world)
    assert sum(before) == sum(after)
    gap, mean = max(after) - min(after), sum(after) / world
    assert gap <= max(max(costs.values(), default=0), EVEN_WITHIN * mean)
    assert max(after) <= max(before)
    assert even_out(home, costs, world) == even  # the same on every rank
    assert even_out(even, costs, world) == even  # and once is enough
    if max(before) - min(before) <= EVEN_WITHIN * mean:
        assert even == home


@given(st.integers(2, 4), st.lists(st.integers(20, 200), min_size=40, max_size=120), st.randoms(use_true_random=False))
def test_rows_that_were_shared_out_as_they_came_move_little(world, lengths, chance):
    shares = Shares(world, by_name=False)
    home = {i: shares.rank_of(str(i), length) for i, length in enumerate(lengths)}
    costs = {i: 3 * length for i, length in enumerate(lengths)}
    even = even_out(home, costs, world)
    assert sum(even[i] != home[i] for i in home) <= world


def test_a_rank_by_name_depends_on_nothing_else():
    forward, backward = Shares(3, by_name=True), Shares(3, by_name=True)
    uids = [f"{position}.{i}" for position in range(40) for i in range(4)]
    ranks = {uid: forward.rank_of(uid, 10) for uid in uids}
    assert {uid: backward.rank_of(uid, 1000) for uid in reversed(uids)} == ranks
    assert min(Counter(ranks.values()).values()) > len(uids) / 3 * 0.7


def test_else_a_row_goes_to_the_rank_with_the_fewest_tokens():
    shares = Shares(3, by_name=False)
    assert [shares.rank_of("x", length) for length in (10, 2, 4, 3, 1, 1)] == [0, 1, 2, 1, 2, 1]


@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60), world=st.integers(1, 4), data=st.data())
def test_a_plan_keeps_samples_where_they_are_but_for_an_even_load(lengths, world, data):
    ranks = data.draw(st.lists(st.integers(0, world - 1), min_size=len(lengths), max_size=len(lengths)))
    idle = data.draw(st.sets(st.integers(0, len(lengths) - 1)))
    samples = [i for i in range(len(lengths)) if i % 3]  # one mini-batch of several
    plan = plan_mini_batch(
        samples,
        lengths,
        lengths,
        world_size=world,
        tokens_per_micro_batch=100,
        packed=False,
        without_gradient=idle,
        ranks=ranks,
    )
    scored = [i for i in samples if i in idle][::SCORED_OF]
    costs = {i: lengths[i] * (3 if i not in idle else 1 if i in scored else 0) for i in samples}
    even = even_out({i: ranks[i] for i in samples}, costs, world)
    assert {i: rank for rank in range(world) for i in plan.samples(rank)} == even
    assert len({len(batches) for batches in plan.trained}) == len({len(batches) for batches in plan.scored}) == 1
