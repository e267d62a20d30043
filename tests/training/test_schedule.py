from itertools import pairwise

import pytest

from meshy.training.schedule import learning_rate


def rates(**options):
    return [learning_rate(step, peak=2.0, total=11, **options) for step in range(11)]


def test_constant():
    assert rates() == [2.0] * 11


def test_warmup_rises_to_the_peak_and_never_starts_at_zero():
    assert rates(warmup=3)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_linear_and_cosine_fall_to_the_final_factor_at_the_last_step():
    linear = rates(schedule="linear")
    assert linear[0] == 2.0 and linear[5] == pytest.approx(1.0) and linear[-1] == 0.0
    cosine = rates(schedule="cosine", warmup=2, final_factor=0.1)
    assert cosine[2] == 2.0 and cosine[-1] == pytest.approx(0.2)
    assert all(a >= b for a, b in pairwise(cosine[2:]))


def test_the_end_may_be_passed_and_a_single_step_has_the_peak():
    assert learning_rate(50, peak=1.0, total=10, schedule="linear") == 0.0
    assert learning_rate(0, peak=1.0, total=1, schedule="cosine") == 1.0


def test_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="constant, linear or cosine"):
        learning_rate(0, peak=1.0, total=1, schedule="step")  # type: ignore[arg-type]
