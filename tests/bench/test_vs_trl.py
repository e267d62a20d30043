"""The figures by which Meshy and TRL are compared, on curves worked by hand."""

from __future__ import annotations

import pytest

from scripts.bench.beside_trl.curve import (
    Step,
    accuracies,
    differ_beyond_noise,
    reached,
    samples_per_second,
    seconds_to,
)

# Steps of 1 s, but the fourth takes 4 s; the first three and the last three are of no account to the rate.
ENDS = [1.0, 2.0, 3.0, 7.0, 8.0, 9.0, 10.0, 11.0]
REWARDS = [0.0, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 0.0]
STEPS = [Step(reward, started, ended) for reward, started, ended in zip(REWARDS, [0.0, *ENDS[:-1]], ENDS, strict=True)]


def test_the_rate_is_of_the_steps_between_warm_up_and_cool_down() -> None:
    assert samples_per_second(STEPS, 10) == 2 * 10 / 5.0
    with pytest.raises(ValueError, match="6 steps"):
        samples_per_second(STEPS[:6], 10)


def test_accuracy_is_reached_at_the_end_of_the_first_five_batches_that_have_it() -> None:
    assert accuracies(STEPS) == [0.5, 0.7, 0.8, 0.7]
    assert (reached(STEPS, 0.7), seconds_to(STEPS, 0.7)) == (6, 9.0)
    assert (reached(STEPS, 0.9), seconds_to(STEPS, 0.9)) == (None, None)
    assert reached(STEPS[:4], 0.0) is None


def test_rewards_differ_only_beyond_their_noise() -> None:
    half, few, most = [1.0] * 4 + [0.0] * 4, [1.0] * 3 + [0.0] * 5, [1.0] * 7 + [0.0]
    assert not differ_beyond_noise([(half, few)] * 16)
    assert differ_beyond_noise([(few, most)] * 16)
    assert not differ_beyond_noise([(few, most)])
