import pytest
import torch

from meshy.algorithms.opsm import opsm_keep
from tests.algorithms.golden_cases import cases, close, flat


@pytest.mark.parametrize("c", cases("opsm"), ids=lambda c: c["name"])
def test_golden(c):
    i = c["input"]
    sequence, *values, expected = flat(i["mask"], i["logprob"], i["old_logprob"], i["advantages"], c["expect"]["keep"])
    close(opsm_keep(*values, sequence, i["delta"]), expected)


def test_only_mistakes_of_sequences_that_became_unlikely_are_masked():
    sequence = torch.tensor([0, 0, 1, 1, 2, 2])
    logprobs = torch.tensor([-2.0, -1.0, -2.0, -1.0, -1.0, -0.9], requires_grad=True)
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    keep = opsm_keep(logprobs, -torch.ones(6), advantages, sequence, 1e-4)
    assert keep.tolist() == [False, False, True, True, True, True]
    assert opsm_keep(logprobs, -torch.ones(6), advantages, sequence, 0.6).all()
    none = torch.zeros(0)
    assert opsm_keep(none, none, none, none.long(), 1e-4).shape == (0,)
