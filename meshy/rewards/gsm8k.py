"""Reward of GSM8K: 1.0 if the final number equals the gold one, else 0.0. Torch-free."""

from __future__ import annotations

from meshy.rewards.math import grade
from meshy.rewards.sample import RewardSample


def reward(sample: RewardSample) -> float:
    """`sample.answer` is the gold number alone, as `meshy.data.gsm8k` reads it from behind the `####`."""
    return float(grade(sample.response, str(sample.answer)))
