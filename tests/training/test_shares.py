"""Sums over a mini-batch become the means that a step reports."""

import pytest

from meshy.training.learner import shares
from meshy.training.plan import MiniBatchPlan


def plan(tokens: int, sequences: int) -> MiniBatchPlan:
    return MiniBatchPlan(
        trained=(((),),), scored=((),), resting=((),), scored_weight=1.0, tokens=tokens, sequences=sequences
    )


def test_shares_are_of_tokens_or_of_sequences_and_sample_sizes_of_weights():
    sums = {
        "entropy": 4.0,
        "ess/weight": 8.0,
        "ess/weight_squared": 8.0,
        "correction/weight": 4.0,
        "correction/weight_squared": 4.0,
        "correction/dropped": 4.0,
        "correction/vetoed": 1.0,
    }
    assert shares(sums, plan(8, 4)) == {
        "entropy": 0.5,
        "ess": 1.0,
        "correction/weight_mean": 0.5,
        "correction/ess": 0.5,  # half of the weights are 0
        "correction/dropped": 0.5,
        "correction/vetoed": 0.25,
    }


def test_sums_of_parts_give_the_sample_size_of_the_whole():
    weights = [1.0, 2.0, 0.0, 0.5]
    parts = [weights[:1], weights[1:]]
    sums = {
        "ess/weight": sum(sum(part) for part in parts),
        "ess/weight_squared": sum(sum(w * w for w in part) for part in parts),
    }
    assert shares(sums, plan(4, 1))["ess"] == pytest.approx(3.5**2 / (4 * 5.25))


def test_nothing_to_train_gives_zeros():
    names = ("ess/weight", "ess/weight_squared", "correction/weight", "correction/weight_squared", "correction/vetoed")
    assert set(shares(dict.fromkeys(names, 0.0), plan(0, 0)).values()) == {0.0}
