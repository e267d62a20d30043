"""Estimators of whole samples: Dr. GRPO, RLOO, MaxRL and ReMax."""

import pytest
import torch

from meshy.algorithms.advantages.dr_grpo import dr_grpo_advantage
from meshy.algorithms.advantages.grpo import grpo_advantage
from meshy.algorithms.advantages.max_rl import max_rl_advantage
from meshy.algorithms.advantages.remax import remax_advantage
from meshy.algorithms.advantages.rloo import rloo_advantage
from meshy.algorithms.interface import AdvantageInputs
from tests.algorithms.golden_cases import cases, close, f64, flat, group_numbers

RELATIVE = {"dr_grpo": dr_grpo_advantage, "rloo": rloo_advantage, "max_rl": max_rl_advantage}
ALL = {"grpo": grpo_advantage, **RELATIVE}


def advantages(estimator, rewards, groups, **kw):
    rewards = rewards if isinstance(rewards, torch.Tensor) else f64(rewards)
    return estimator(AdvantageInputs(rewards=rewards, groups=group_numbers(groups), **kw)).advantages


@pytest.mark.parametrize("name", RELATIVE)
def test_golden(name):
    for c in cases(name):
        expect = c["expect"]
        wanted = expect["advantage"] if "advantage" in expect else expect["advantage_single_is_zero"]
        close(advantages(RELATIVE[name], c["input"]["rewards"], c["input"]["group"]), wanted)


@pytest.mark.parametrize("estimator", ALL.values(), ids=ALL)
class TestEveryGroupRelativeEstimator:
    def test_without_samples_there_is_nothing(self, estimator):
        assert advantages(estimator, [], []).shape == (0,)

    def test_a_group_of_one_is_zero_and_counted(self, estimator):
        out = estimator(AdvantageInputs(rewards=f64([0.7, 1, 0]), groups=torch.tensor([5, 9, 9])))
        assert out.advantages[0] == 0 and out.advantages[1] > 0 > out.advantages[2]
        assert out.metrics == {"groups": 2, "zero_variance_groups": 0, "single_sample_groups": 1}

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_an_all_equal_group_is_exactly_zero_despite_float_noise(self, estimator, dtype):
        noisy = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0, 1], dtype=dtype)
        noisy[2] = torch.nextafter(noisy[2], torch.tensor(1.0, dtype=dtype))
        out = advantages(estimator, noisy, [0, 0, 0, 1, 1])
        assert (out[:3] == 0).all() and out[3] < 0 < out[4] and out.dtype == dtype

    def test_a_reward_that_is_no_number_is_refused_by_name(self, estimator):
        with pytest.raises(ValueError, match="reward of sample b is nan"):
            advantages(estimator, [1, float("nan"), 0], [0, 0, 1], names=("a", "b", "c"))

    def test_a_sample_knows_its_own_group_only(self, estimator):
        mixed = advantages(estimator, [1, 5, 0, 7, 1, 6], [0, 1, 0, 1, 0, 1])
        close(mixed[::2], advantages(estimator, [1, 0, 1], [0, 0, 0]))
        close(mixed[1::2], advantages(estimator, [5, 7, 6], [0, 0, 0]))


def test_leave_one_out_is_the_mean_of_the_others():
    rewards = f64([0.3, -1, 2, 7, 0.25])
    others = [(rewards.sum() - r) / 4 for r in rewards]
    close(advantages(rloo_advantage, rewards, [0] * 5), rewards - torch.stack(others))


@pytest.mark.parametrize("rewards", [[-1, 1], [-3, 1], [0.1, 0.2, -0.3], [0, 0]])
def test_max_rl_has_no_scale_where_the_mean_is_not_positive(rewards):
    assert (advantages(max_rl_advantage, rewards, [0] * len(rewards)) == 0).all()


@pytest.mark.parametrize("c", cases("remax"), ids=lambda c: c["name"])
def test_remax_golden(c):
    """The golden rewards come with the last token, so the return to go is the reward of the sample."""
    i = c["input"]
    rewards = f64(i["token_rewards"]).sum(1)
    inputs = AdvantageInputs(
        rewards=rewards, groups=torch.arange(len(rewards)), columns={"greedy_reward": f64(i["baseline"])}
    )
    sequence, expected = flat(i["mask"], c["expect"]["advantages"])
    close(remax_advantage(inputs).advantages[sequence], expected)


def test_remax_reads_the_column_that_it_is_told_and_says_which_is_missing():
    inputs = AdvantageInputs(rewards=f64([1, 0]), groups=torch.tensor([0, 0]), columns={"greedy": f64([0.25, 0.75])})
    out = remax_advantage(inputs, baseline="greedy")
    close(out.advantages, [0.75, -0.75])
    assert out.metrics == {"greedy_reward": 0.5}
    with pytest.raises(ValueError, match=r"'greedy_reward'.*there are: greedy\)"):
        remax_advantage(inputs)


def test_remax_refuses_a_baseline_that_is_no_number():
    inputs = AdvantageInputs(
        rewards=f64([1, 0]), groups=torch.tensor([0, 0]), names=("a", "b"),
        columns={"greedy_reward": f64([1, float("nan")])},
    )  # fmt: skip
    with pytest.raises(ValueError, match="greedy_reward of sample b is nan"):
        remax_advantage(inputs)
