"""Which groups are worth training: functions from the rewards of a group to whether it is kept. A recipe names one by
import path; a group that is not kept is replaced at once."""

from __future__ import annotations

from collections.abc import Sequence

EQUAL_WITHIN = 1e-8


def varied_rewards(rewards: Sequence[float]) -> bool:
    """Dynamic sampling of DAPO (arXiv 2503.14476): a group whose rewards are all equal has no group-relative advantage,
    and so no gradient."""
    return max(rewards) - min(rewards) > EQUAL_WITHIN
