"""Which groups make up a batch: against a plain list of groups."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshy.columns import ANY_BATCH
from meshy.training.inbox import Inbox, MisfitGroup
from tests.training.arrivals import arrive, group_columns


@dataclass
class Whole:
    name: str
    size: int
    batch: int
    oldest: int


GROUPS = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from((ANY_BATCH, 0, 1, 2)), st.integers(0, 3)), min_size=1, max_size=12
)


@given(GROUPS, st.randoms(use_true_random=False), st.data())
def test_whole_groups_are_taken_oldest_first_then_as_they_became_whole(sizes, chance: random.Random, data):
    made = [
        group_columns(position, size, batch=batch, oldest_version=oldest)
        for position, (size, batch, oldest) in enumerate(sizes)
    ]
    coming = [(position, i) for position, (size, _, _) in enumerate(sizes) for i in range(size)]
    chance.shuffle(coming)
    inbox, whole, came = Inbox(), [], [0] * len(sizes)
    for position, i in coming:
        arrive(inbox, made[position], [i])
        came[position] += 1
        size, batch, oldest = sizes[position]
        if came[position] == size:
            whole.append(Whole(str(position), size, batch, oldest))
        incomplete = sum(n for n, (size, _, _) in zip(came, sizes, strict=True) if n < size)
        if data.draw(st.booleans()):
            than = data.draw(st.integers(0, 3))
            old = [group for group in whole if group.batch == ANY_BATCH and group.oldest < than]
            assert [group.columns["group_id"][0] for group in inbox.drop_older(than)] == [group.name for group in old]
            whole = [group for group in whole if group not in old]
        wanted = data.draw(st.integers(0, 2))
        fit = sorted((g for g in whole if g.batch in (wanted, ANY_BATCH)), key=lambda group: group.oldest)
        assert inbox.have(wanted) == sum(group.size for group in fit)
        assert inbox.samples == sum(group.size for group in whole) + incomplete
        # The first so many groups give the number that is asked for; what is left over afterwards stays.
        count = data.draw(st.integers(1, 3))
        if len(fit) < count:
            assert inbox.take(wanted, inbox.have(wanted) + 1) is None
            continue
        taken = inbox.take(wanted, sum(group.size for group in fit[:count]))
        assert [group.columns["group_id"][0] for group in taken] == [group.name for group in fit[:count]]
        for group in taken:
            uids = [row.uids[0] for row in group.rows]
            assert sorted(uids) == made[int(group.columns["group_id"][0])]["uid"]
            assert [uid.split(".")[0] for uid in uids] == group.columns["group_id"]
        whole = [group for group in whole if group not in fit[:count]]
    assert inbox.samples == sum(group.size for group in whole)  # no row is lost, none counted twice


def test_a_group_that_does_not_fit_is_named():
    inbox = Inbox()
    arrive(inbox, group_columns(7, 3))
    with pytest.raises(MisfitGroup, match=r"group '7' has 3 samples, 1 more than are left to batch 4"):
        inbox.take(4, 2)
    assert inbox.samples == 3  # and it is still there


def test_a_row_beyond_its_group_is_refused():
    inbox = Inbox()
    arrive(inbox, group_columns(7, 2))
    with pytest.raises(MisfitGroup, match=r"row '7\.2' came when all 2 rows of its group '7' were there"):
        arrive(inbox, group_columns(7, 3), [2])


def test_ranks_travel_with_the_rows():
    inbox, columns = Inbox(), group_columns(0, 3)
    for i, rank in ((2, 1), (0, 0), (1, 1)):
        arrive(inbox, columns, [i], rank)
    (group,) = inbox.take(0, 3)
    assert [row.uids[0] for row in group.rows] == ["0.2", "0.0", "0.1"] and group.ranks == [1, 0, 1]
