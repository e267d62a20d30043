import pytest
import torch

from meshy.algorithms.whiten import masked_whiten, whiten
from tests.algorithms.golden_cases import cases, close, f64


@pytest.mark.parametrize("c", cases("masked_whiten"), ids=lambda c: c["name"])
def test_masked_whiten(c):
    close(masked_whiten(f64(c["input"]["x"]), f64(c["input"]["mask"]).bool()), c["expect"]["y"])


def test_fewer_than_two_entries_are_zero():
    assert (masked_whiten(torch.tensor([3.0, 9.0]), torch.tensor([True, False])) == 0).all()
    assert whiten(torch.tensor([3.0])).tolist() == [0.0]
    assert whiten(torch.zeros(0)).shape == (0,)


def test_entries_that_are_all_equal_become_zero():
    for value in (0.0, 0.1, 1e6):
        assert whiten(torch.full((1000,), value)).abs().max() < 1e-3


def test_whitened_values_have_mean_0_and_variance_1():
    out = whiten(7 + 3 * torch.randn(50, generator=torch.Generator().manual_seed(0)))
    assert out.mean().abs() < 1e-6 and abs(out.var() - 1) < 1e-5 and out.dtype == torch.float32
