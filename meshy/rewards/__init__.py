"""Scoring of responses, in worker processes that can be killed.

A reward is a function of one response, named by its import path:

    def reward(sample: RewardSample) -> float: ...

`meshy.rewards.pool.RewardPool` runs it.
"""

from meshy.rewards.sample import RewardResult, RewardSample

__all__ = ["RewardResult", "RewardSample"]
