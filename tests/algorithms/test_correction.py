import math
import re

import pytest

from meshy.algorithms.correction import Correction


def test_nothing_is_corrected_by_default():
    assert not Correction().active and Correction().faults("rollout") == []


@pytest.mark.parametrize(
    ("old_logprobs", "options"),
    [
        ("recompute", {"importance": "token"}),
        ("recompute", {"importance": "sequence", "low": 0.5, "high": 5.0, "action": "mask"}),
        ("loglinear", {"importance": "token", "high": 5.0, "action": "mask"}),
        ("loglinear", {"importance": "geometric", "high": None}),
        ("rollout", {"veto": 1e-4, "reject": "seq_mean_k1", "reject_low": -0.7, "reject_high": 0.7, "opsm": 0.0}),
    ],
)
def test_what_is_sound_passes(old_logprobs, options):
    assert Correction(**options).active
    assert Correction(**options).faults(old_logprobs) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"importance": "token", "low": -0.1}, r"correction.low: expected 0 to 1 .*got -0.1"),
        ({"importance": "token", "low": 3.0}, "correction.low: expected 0 to 1"),
        ({"importance": "token", "high": 0.5}, "correction.high: expected at least 1"),
        ({"importance": "token", "high": math.nan}, "correction.high: expected at least 1"),
        ({"importance": "token", "action": "mask", "high": None}, "correction.action: expected a bound .*got mask"),
        ({"action": "mask"}, "correction.importance: expected token, sequence or geometric"),
        ({"low": 0.5}, "correction.importance: expected token, sequence or geometric"),
        ({"veto": 1.0}, "correction.veto: expected more than 0 and less than 1, or none, got 1.0"),
        ({"veto": 0.0}, "correction.veto: expected more than 0"),
        ({"reject": "seq_mean_k3"}, "correction.reject: expected a bound .*got seq_mean_k3 without"),
        ({"reject_high": 0.1}, "correction.reject: expected a statistic"),
        ({"reject": "seq_sum_k1", "reject_low": 0.1, "reject_high": 0.2}, "correction.reject_low: expected 0 or less"),
        ({"reject": "token_k1", "reject_low": -0.2, "reject_high": -0.1}, "correction.reject_high: expected 0 or more"),
        ({"reject": "token_k3", "reject_low": -0.1}, "correction.reject_low: expected none for token_k3"),
        ({"opsm": -1e-4}, "correction.opsm: expected 0 or more, or none, got -0.0001"),
    ],
)
def test_what_is_not_is_refused(options, message):
    (fault,) = Correction(**options).faults("recompute")
    assert re.search(message, fault)


def test_a_ratio_that_corrects_already_is_not_weighted_again():
    (fault,) = Correction(importance="token").faults("rollout")
    assert re.search(r"correction.importance: expected none with old_logprobs=rollout.*recompute or loglinear", fault)
