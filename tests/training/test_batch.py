import pytest
import torch

from meshy.queue.rows import Rows
from meshy.training.batch import BadRows, batch_of, samples_of, staleness


def arrived(uids, groups, positions, rewards, masks):
    count = len(uids)
    rows = Rows("train", tuple(uids), tuple(range(count)), "trainer")
    return rows, {
        "group_id": groups,
        "prompt_id": [f"p{p}" for p in positions],
        "position": torch.tensor(positions),
        "loss_mask": [torch.tensor(mask, dtype=torch.bool) for mask in masks],
        "reward": torch.tensor(rewards),
        "truncated": torch.tensor([False] * (count - 1) + [True]),
        "t_sent": torch.tensor([float(p) for p in positions], dtype=torch.float64),
        "t_generated": torch.tensor([10.0 + p for p in positions], dtype=torch.float64),
        "t_rewarded": torch.tensor([20.0 + p for p in positions], dtype=torch.float64),
    }


def test_rows_are_put_in_the_order_of_the_data_whatever_order_they_came_in():
    late = arrived(["c", "d"], ["g1", "g1"], [1, 1], [0.0, 1.0], [[0, 1], [0, 0, 0]])
    early = arrived(["a", "b"], ["g0", "g0"], [0, 0], [1.0, 2.0], [[0, 1, 1], [0, 0, 1]])
    batch = batch_of([late, early])
    assert batch.rows.uids == ("a", "b", "c", "d")
    assert batch.rewards.tolist() == [1.0, 2.0, 0.0, 1.0] and batch.groups.tolist() == [0, 0, 1, 1]
    assert batch.lengths == (3, 3, 2, 3) and batch.written == (2, 1, 1, 0) and batch.tokens == 11
    assert (batch.prompts, batch.truncated) == (2, 2)
    assert (batch.first_sent, batch.last_generated, batch.last_rewarded) == (0.0, 11.0, 21.0)


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
    (sample,) = samples_of(ROWS, columns(extra=[torch.ones(3)]), [7], [0.0] * 7 + [0.5], ["extra"]).values()
    assert sample.columns["advantages"].tolist() == [0.5] * 3
    assert sample.columns["extra"].tolist() == [1.0] * 3
    assert sample.columns["token_versions"].tolist() == [0, 4, 5]


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
