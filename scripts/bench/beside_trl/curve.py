"""How a run learnt, batch by batch, and the figures that it is compared by. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

SMOOTHED_OVER = 5  # batches
WARM_UP = 3  # batches that no rate counts
COOL_DOWN = 3  # likewise at the end, where an asynchronous run lives on what it has generated before


@dataclass(frozen=True)
class Step:
    """One batch: its mean training reward, when it began and ended, in unix seconds, and the mean length of its
    responses, in tokens."""

    reward: float
    started: float
    ended: float
    length: float = 0.0


def samples_per_second(steps: Sequence[Step], batch_size: int) -> float:
    """Over all steps but the first WARM_UP and the last COOL_DOWN. ValueError where none is left."""
    counted = steps[WARM_UP : len(steps) - COOL_DOWN]
    if not counted:
        raise ValueError(f"{len(steps)} steps: a rate needs more than {WARM_UP + COOL_DOWN}")
    return len(counted) * batch_size / (counted[-1].ended - counted[0].started)


def accuracies(steps: Sequence[Step]) -> list[float]:
    """The mean training reward of each SMOOTHED_OVER batches in a row; the first stands for step SMOOTHED_OVER - 1."""
    rewards = [step.reward for step in steps]
    return [fmean(rewards[end - SMOOTHED_OVER : end]) for end in range(SMOOTHED_OVER, len(rewards) + 1)]


def reached(steps: Sequence[Step], accuracy: float) -> int | None:
    """How many steps it took until the accuracy was reached."""
    over = enumerate(accuracies(steps), SMOOTHED_OVER)
    return next((count for count, value in over if value >= accuracy), None)


def seconds_to(steps: Sequence[Step], accuracy: float) -> float | None:
    """From the start of the first step until the accuracy was reached."""
    count = reached(steps, accuracy)
    return None if count is None else steps[count - 1].ended - steps[0].started


def differ_beyond_noise(groups: Sequence[tuple[Sequence[float], Sequence[float]]], errors: float = 4.0) -> bool:
    """Whether rewards of the same prompts, by two samplers, differ in the mean by more than that many standard errors,
    which come from the spread within the groups. groups: of each prompt, either sampler's rewards of 0 or 1."""
    gap = variance = 0.0
    for mine, theirs in groups:
        rate = fmean([*mine, *theirs])
        gap += fmean(mine) - fmean(theirs)
        # A group that is all right or all wrong may still be so by chance: half a sample of either kind is added.
        count = len(mine) + len(theirs)
        rate = (rate * count + 0.5) / (count + 1)
        variance += rate * (1 - rate) * (1 / len(mine) + 1 / len(theirs))
    return abs(gap) > errors * variance**0.5
