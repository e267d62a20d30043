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
from scripts.bench.vs_trl import same_start, verdict

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


def side(rate: float, seconds: float | None) -> dict[str, float | None]:
    return {"samples_per_second": rate, "seconds": seconds, "all_seconds": 80.0}


def test_bars_are_held_against_what_was_measured_and_not_what_is_shown() -> None:
    assert verdict(side(200.0, 30.0), side(100.0, 50.0), 0.85) == ({"samples_per_second": 2.0, "seconds": 0.6}, [])
    _, missed = verdict(side(199.9, 30.1), side(100.0, 50.0), 0.85)
    assert [line.split(" of ")[0] for line in missed] == ["1.999 x the samples/s", "0.602"]


def test_one_that_does_not_get_there_is_judged_to_its_disadvantage() -> None:
    assert verdict(side(300.0, 40.0), side(100.0, None), 0.85)[0]["seconds"] == 0.5  # of all the time that TRL took
    ratios, missed = verdict(side(300.0, None), side(100.0, 50.0), 0.85)
    assert "seconds" not in ratios and "Meshy did not reach accuracy 0.85" in missed[0]


def test_both_must_start_from_the_same_model() -> None:
    theirs = {str(i): [1.0] * 4 + [0.0] * 4 for i in range(8)}
    assert same_start({name: [1.0, 0.0] * 4 for name in theirs}, theirs) == []
    (missed,) = same_start({name: [1.0] * 8 for name in theirs}, theirs)
    assert "differ beyond noise: Meshy 1.000, TRL 0.500" in missed
    (missed,) = same_start({"0": theirs["0"]}, theirs)
    assert "only 1 of TRL's first 8 prompts" in missed
