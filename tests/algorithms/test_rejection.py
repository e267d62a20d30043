from typing import get_args

import pytest
import torch

from meshy.algorithms.correction import Statistic
from meshy.algorithms.rejection import rejection_keep, rejection_statistic
from tests.algorithms.golden_cases import cases, close, flat

D = torch.tensor([0.5, -0.1, 0.0, 2.0], dtype=torch.float64)
SEQUENCE = torch.tensor([0, 0, 2, 2])  # sequence 1 has no token
K = {"k1": D, "k2": D.square() / 2, "k3": D.exp() - 1 - D}
REDUCE = {"mean": torch.mean, "sum": torch.sum, "max": torch.max}


@pytest.mark.parametrize("c", cases("rollout_reject"), ids=lambda c: c["name"])
def test_golden(c):
    i, expect = c["input"], c["expect"]
    sequence, train, rollout, mask_after = flat(
        i["mask"], i["train_logprob"], i["rollout_logprob"], expect["mask_after"]
    )
    statistic = rejection_statistic(train, rollout, sequence, c["name"])
    close(statistic, expect["statistic"][: len(statistic)])
    assert not any(expect["statistic"][len(statistic) :])  # rows without a token come last here
    close(rejection_keep(train, rollout, sequence, statistic=c["name"], low=i["low"], high=i["high"]), mask_after)


@pytest.mark.parametrize("statistic", get_args(Statistic))
def test_every_statistic_is_its_definition(statistic):
    scope, kind = statistic.rsplit("_", 1)
    per_token = K[kind]
    value = rejection_statistic(D, torch.zeros(4, dtype=torch.float64), SEQUENCE, statistic)
    if scope == "token":
        close(value, per_token)
    else:
        how = REDUCE[scope.removeprefix("seq_")]
        close(value, torch.stack([how(per_token[:2]), torch.tensor(0.0), how(per_token[2:])]))


def test_a_token_statistic_drops_tokens_and_another_the_whole_sequence():
    zeros = torch.zeros(4)
    assert rejection_keep(D, zeros, SEQUENCE, statistic="token_k2", high=0.1).tolist() == [False, True, True, False]
    assert rejection_keep(D, zeros, SEQUENCE, statistic="seq_max_k2", high=0.2).tolist() == [True, True, False, False]
    none = torch.zeros(0)
    assert rejection_keep(none, none, none.long(), statistic="seq_mean_k3", high=0.1).shape == (0,)


def test_unknown_statistics_are_refused():
    with pytest.raises(ValueError, match="choose one of token_k1"):
        rejection_statistic(D, D, SEQUENCE, "seq_median_k1")
    with pytest.raises(ValueError, match="unknown KL estimate 'k4'"):
        rejection_statistic(D, D, SEQUENCE, "seq_mean_k4")
