"""A number that a row does not have is no fault; one that is no number is."""

from __future__ import annotations

import math

import pytest

from meshy.learning.numbers import rewards_of
from meshy.learning.rewards import RewardRule


def test_a_row_that_lacks_a_column_has_nothing_of_it():
    columns = {name: rewards_of(name, values, ["a", "b"]) for name, values in (("x", [1.0, None]), ("y", [2.0, 3.0]))}
    assert RewardRule(weights={"x": 10.0, "y": 1.0}).rewards(columns).tolist() == [12.0, 3.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_a_reward_that_is_no_finite_number_is_named(bad: float):
    with pytest.raises(ValueError, match=r"row b: its model_reward is .*; a reward must be a finite number"):
        rewards_of("model_reward", [1.0, bad], ["a", "b"])
