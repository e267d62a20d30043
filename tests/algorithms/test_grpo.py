import pytest
import torch

from meshy.algorithms.advantages.grpo import grpo_advantage
from meshy.algorithms.interface import AdvantageInputs
from tests.algorithms.golden_cases import case, cases, close, f64, group_numbers


def advantages(rewards, groups, **kw):
    rewards = rewards if isinstance(rewards, torch.Tensor) else f64(rewards)
    return grpo_advantage(AdvantageInputs(rewards=rewards, groups=group_numbers(groups), **kw))


NUMBERS = [c for c in cases("grpo") if "advantage_single_is_zero" in c["expect"]]


@pytest.mark.parametrize("c", NUMBERS, ids=lambda c: c["name"])
def test_golden(c):
    close(advantages(c["input"]["rewards"], c["input"]["group"]).advantages, c["expect"]["advantage_single_is_zero"])


def test_nan_reward_is_refused_by_name():
    c = case("grpo", "nan_reward")
    with pytest.raises(ValueError, match="sample b is nan"):
        advantages(c["input"]["rewards"], c["input"]["group"], names=("a", "b", "c", "d"))
    with pytest.raises(ValueError, match=r"row 2 is inf.*2 such"):
        advantages([1, 0, float("inf"), float("-inf")], [0, 0, 0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_all_equal_group_is_exactly_zero_despite_float_noise(dtype, size):
    noisy = torch.tensor([0.1 + 0.2] + [0.3] * (size - 1), dtype=dtype)
    noisy[-1] = torch.nextafter(noisy[-1], torch.tensor(1.0, dtype=dtype))
    out = advantages(torch.cat([noisy, torch.tensor([0.0, 1.0], dtype=dtype)]), [0] * size + [1, 1])
    assert (out.advantages[:size] == 0).all()
    assert out.advantages[size] < 0 < out.advantages[size + 1]
    assert out.metrics["zero_variance_groups"] == 1


def test_left_over_rows_of_a_partial_group_stay_bounded():
    out = advantages([1, 0, 1, 0, 1, 0.5], [0, 0, 0, 0, 1, 1]).advantages
    assert out.abs().max() < 1
