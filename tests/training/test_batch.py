import pytest
import torch

from meshy.algorithms.overlong import Overlong
from meshy.columns import Column
from meshy.learning.rewards import RewardRule
from meshy.queue.rows import Rows
from meshy.training.batch import BadRows, batch_of, joined, samples_of, staleness
from meshy.training.inbox import Inbox
from tests.training.arrivals import arrive, group_columns, groups


def test_rows_are_put_in_the_order_of_the_data_whatever_order_they_came_in():
    inbox = Inbox()
    late, early = group_columns(11, 2, length=6, truncated=True, lost=1), group_columns(3, 12)
    arrive(inbox, late, [1, 0], rank=1)
    arrive(inbox, early, [10, *range(10), 11], rank=0)
    batch = batch_of(inbox.take(0, 14))
    assert batch.rows.uids == (*(f"3.{i}" for i in range(12)), "11.0", "11.1")  # and not 3.10 before 3.2
    assert batch.rewards.tolist() == [*range(12), 0.0, 1.0]
    assert batch.groups.tolist() == [0] * 12 + [1] * 2
    assert batch.lengths == (*range(4, 16), 6, 7) and batch.written == (*range(3, 15), 5, 6)
    assert batch.ranks == (0,) * 12 + (1,) * 2
    assert (batch.tokens, batch.prompts, batch.truncated, batch.lost) == (sum(range(4, 16)) + 13, 2, 2, 2)
    assert (batch.first_sent, batch.last_generated, batch.last_rewarded) == (3.0, 21.0, 31.0)


def test_parts_joined_are_one_batch_whose_groups_stay_apart():
    first = batch_of(groups(group_columns(5), group_columns(2, 3), ranks=(1, 0)))
    second = batch_of(groups(group_columns(4, truncated=True)))
    assert first.groups.tolist() == [0, 0, 0, 1, 1]
    whole = joined([first, second])
    assert whole.rows.uids == ("2.0", "2.1", "2.2", "5.0", "5.1", "4.0", "4.1")
    assert whole.groups.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert whole.rewards.tolist() == [0.0, 1.0, 2.0, 0.0, 1.0, 0.0, 1.0]
    assert whole.lengths == (4, 5, 6, 4, 5, 4, 5) and whole.written == (3, 4, 5, 3, 4, 3, 4)
    assert whole.ranks == (0, 0, 0, 1, 1, 0, 0)
    assert (whole.tokens, whole.prompts, whole.truncated, whole.lost) == (33, 3, 2, 0)
    assert (whole.first_sent, whole.last_generated, whole.last_rewarded) == (2.0, 15.0, 25.0)
    assert joined([first]).rows == first.rows


def columns(**changes):
    data = {
        "tokens": [torch.tensor([1, 2, 3])],
        "loss_mask": [torch.tensor([False, True, True])],
        "rollout_logprobs": [torch.zeros(3)],
        "token_versions": [torch.tensor([0, 4, 5], dtype=torch.int32)],
    }
    return {**data, **changes}


ROWS = Rows("train", ("a",), (0,), "trainer")


def test_a_sample_carries_its_advantage_on_every_token():
    extra = {"extra": Column("extra", "float32", "jagged")}
    (sample,) = samples_of(ROWS, columns(extra=[torch.ones(3)]), [7], [0.0] * 7 + [0.5], extra).values()
    assert sample.columns["advantages"].tolist() == [0.5] * 3
    assert sample.columns["extra"].tolist() == [1.0] * 3
    assert sample.columns["token_versions"].tolist() == [0, 4, 5]


def test_a_row_that_nobody_was_to_score_says_so_at_every_token():
    rows = Rows("train", ("a", "b"), (0, 1), "trainer")
    data = {name: values * 2 for name, values in columns().items()}
    data |= {"said": [None, torch.ones(3)], "ids": [torch.zeros(3, 4, dtype=torch.int32), None], "none": [None, None]}
    further = {
        "said": Column("said", "float32", "jagged"),
        "ids": Column("ids", "int32", "jagged2d"),
        "none": Column("none", "float32", "jagged2d"),
    }
    first, second = samples_of(rows, data, [0, 1], [0.0, 0.0], further).values()
    assert first.columns["said"].isnan().all() and second.columns["said"].tolist() == [1.0] * 3
    assert first.columns["ids"].shape == second.columns["ids"].shape == (3, 4)
    assert (second.columns["ids"] == -1).all() and second.columns["ids"].dtype == torch.int32
    assert first.columns["none"].shape == (3, 1) and first.columns["none"].isnan().all()


def test_a_reward_is_the_sum_of_its_columns_less_what_long_responses_lose():
    came = groups(group_columns(0, 4))
    for group in came:
        group.columns["judged"] = [0.5, None, 1.0, 0.0]
    rule = RewardRule(weights={"reward": 1.0, "judged": 2.0}, overlong=Overlong(buffer=2, factor=0.5), max_length=5)
    batch = batch_of(came, rule)
    assert batch.written == (3, 4, 5, 6)
    assert batch.rewards.tolist() == [0 + 1, 1 - 0.25, 2 + 2 - 0.5, 3 - 0.5]
    assert batch.columns["judged"].tolist()[2] == 1.0 and batch.columns["judged"][1].isnan()


def test_rows_that_cannot_be_trained_are_refused_by_name():
    with pytest.raises(BadRows, match="row a: column 'rollout_logprobs' has 2 entries for 3 tokens"):
        samples_of(ROWS, columns(rollout_logprobs=[torch.zeros(2)]), [0], [0.0])
    with pytest.raises(BadRows, match="row a: its first token"):
        samples_of(ROWS, columns(loss_mask=[torch.tensor([True, True, True])]), [0], [0.0])


def test_staleness_counts_versions_of_written_tokens_only():
    assert staleness(ROWS, columns(), 6, None).tolist() == [2, 1]
    assert staleness(ROWS, columns(), 6, 2).tolist() == [2, 1]
    with pytest.raises(BadRows, match="2 versions old, but max_staleness is 1"):
        staleness(ROWS, columns(), 6, 1)
    with pytest.raises(BadRows, match="version 5, but 4 is being trained"):
        staleness(ROWS, columns(), 4, None)
