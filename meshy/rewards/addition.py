"""Reward of the addition task: 1.0 if the number after the last `#` is the sum, else 0.0."""

from __future__ import annotations

import re

from meshy.rewards.sample import RewardSample

_ANSWER = re.compile(r"#(\d+)")


def reward(sample: RewardSample) -> float:
    """1.0 or 0.0; a response without `#<digits>` is wrong."""
    found = _ANSWER.findall(sample.response)
    return float(bool(found) and found[-1] == str(sample.answer))
