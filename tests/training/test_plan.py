from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshy.training.plan import micro_batches, mini_batches, plan_mini_batch

lengths_of = st.lists(st.integers(1, 100), min_size=0, max_size=60)


@given(
    lengths=lengths_of,
    world=st.integers(1, 5),
    budget=st.integers(1, 400),
    packed=st.booleans(),
    idle=st.sets(st.integers(0, 60)),
)
def test_every_sample_is_trained_once_within_the_budget_and_ranks_keep_in_step(lengths, world, budget, packed, idle):
    written = [length // 2 for length in lengths]
    plan = plan_mini_batch(
        range(len(lengths)),
        lengths,
        written,
        world_size=world,
        tokens_per_micro_batch=budget,
        packed=packed,
        only_score=idle,
    )
    assert len(plan.trained) == len(plan.scored) == world
    assert len({len(batches) for batches in plan.trained}) == len({len(batches) for batches in plan.scored}) == 1
    assert len(plan.trained[0]) >= 1  # every rank runs backward, if only over nothing
    used = Counter(sample for rank in range(world) for batch in plan.of(rank) for sample in batch)
    assert used == Counter(range(len(lengths)))
    assert {sample for rank in plan.scored for batch in rank for sample in batch} == idle & set(range(len(lengths)))
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
