import math

import pytest
import torch

from meshy.algorithms.importance import bounded_weights, effective_sample_size, importance_ratios, vetoed_sequences
from tests.algorithms.golden_cases import case, cases, close, flat

ACTIONS = {"truncate": "truncate", "clip": "truncate", "icepop": "mask", "mask": "mask"}


def golden(c):
    i = c["input"]
    sequence, train, rollout = flat(i["mask"], i["train_logprob"], i["rollout_logprob"])
    level, action = c["name"].split("_")
    return bounded_weights(importance_ratios(train, rollout, sequence, level), ACTIONS[action], i["low"], i["high"])


@pytest.mark.parametrize("c", cases("rollout_is"), ids=lambda c: c["name"])
def test_golden(c):
    weights, keep = golden(c)
    _, expected, mask_after = flat(c["input"]["mask"], c["expect"]["weights"], c["expect"]["mask_after"])
    if c["name"].endswith("icepop"):  # says the factor where "mask" says weight and mask
        close(weights * keep, expected * mask_after)
    else:
        close(weights, expected)
        close(keep, mask_after)


def test_masking_by_weight_and_by_mask_is_the_same_factor():
    c = case("rollout_is", "sequence_icepop")
    same = {**c, "name": "sequence_mask"}
    close(golden(c)[0] * golden(c)[1], golden(same)[0] * golden(same)[1])


def test_no_gradient_passes_through_a_weight():
    train = torch.zeros(2, requires_grad=True)
    assert not importance_ratios(train, torch.ones(2), torch.tensor([0, 0]), "sequence").requires_grad


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_far_off_policy_stays_finite_and_an_empty_batch_is_empty(level):
    far = torch.tensor([-1e4, 0.0, -1e4, 0.0])
    assert torch.isfinite(importance_ratios(far, -far - 1e4, torch.tensor([0, 0, 2, 2]), level)).all()
    none = torch.zeros(0)
    for action in ("truncate", "mask"):
        weights, keep = bounded_weights(importance_ratios(none, none, none.long(), level), action, 0.5, 2.0)
        assert weights.shape == keep.shape == (0,)


def test_one_hopeless_token_vetoes_its_sequence():
    sequence = torch.tensor([0, 0, 2, 2])  # sequence 1 has no token
    ratio = torch.tensor([1.0, 0.99e-4, 1.01e-4, 1e9])
    assert vetoed_sequences(ratio.log(), torch.zeros(4), sequence, 1e-4).tolist() == [True, False, False]


def test_effective_sample_size():
    assert effective_sample_size(3.0, 3.0, 3) == 1
    assert effective_sample_size(4.0, 16.0, 8) == 1 / 8
    assert effective_sample_size(0.0, 0.0, 8) == effective_sample_size(0.0, 0.0, 0) == 0
    assert not math.isnan(effective_sample_size(0.0, 0.0, 0))


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="token, sequence or geometric"):
        importance_ratios(torch.zeros(1), torch.zeros(1), torch.tensor([0]), "word")
    with pytest.raises(ValueError, match="truncate or mask"):
        bounded_weights(torch.ones(1), "drop", None, None)
