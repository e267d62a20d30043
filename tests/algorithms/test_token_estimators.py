"""Estimators of tokens: REINFORCE++, its variant with a baseline, GAE and on-policy distillation."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from threading import Barrier
from typing import Any

import pytest
import torch

from meshy.algorithms.advantages.dr_grpo import dr_grpo_advantage
from meshy.algorithms.advantages.gae import gae_advantage
from meshy.algorithms.advantages.opd import opd_advantage
from meshy.algorithms.advantages.reinforce_pp import reinforce_pp_advantage
from meshy.algorithms.advantages.reinforce_pp_baseline import reinforce_pp_baseline_advantage
from meshy.algorithms.interface import AdvantageInputs, TokenAdvantages, TokenInputs
from meshy.algorithms.returns import discounted_sum, following
from tests.algorithms.golden_cases import case, cases, close, f64, flat, group_numbers

NAN = float("nan")


def token_inputs(mask, rewards=None, advantages=None, rollout=None, **columns) -> TokenInputs:
    zeros = f64(mask) * 0
    given = [zeros.tolist() if values is None else values for values in (rewards, advantages, rollout)]
    sequence, *three = flat(mask, *given)
    names = dict(zip(columns, flat(mask, *columns.values())[1:], strict=True))
    return TokenInputs(
        rewards=three[0], advantages=three[1], rollout_logprobs=three[2], sequence=sequence, columns=names
    )


def on_ranks(estimator: Callable[[TokenInputs], TokenAdvantages], parts: Sequence[TokenInputs]) -> list[Any]:
    """The estimator on every part at once, with a `total` that adds up over them and waits until all have called it."""
    everyone, said = Barrier(len(parts), timeout=10), [torch.zeros(0)] * len(parts)

    def work(rank: int) -> TokenAdvantages:
        def total(values: torch.Tensor) -> torch.Tensor:
            assert values.device.type == "cpu"
            said[rank] = values
            everyone.wait()
            summed = torch.stack(said).sum(0)
            everyone.wait()
            return summed

        return estimator(replace(parts[rank], total=total))

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(work, range(len(parts))))


def cut(inputs: TokenInputs, *bounds: int) -> list[TokenInputs]:
    """The tokens of sequences [bounds[0], bounds[1]), and so on, each part numbered from 0."""
    parts = []
    for start, end in pairwise(bounds):
        mine = (inputs.sequence >= start) & (inputs.sequence < end)
        parts.append(
            TokenInputs(
                rewards=inputs.rewards[mine],
                advantages=inputs.advantages[mine],
                rollout_logprobs=inputs.rollout_logprobs[mine],
                sequence=inputs.sequence[mine] - start,
                columns={name: values[mine] for name, values in inputs.columns.items()},
            )
        )
    return parts


# Sums along sequences -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.0, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("lengths", [[], [1], [1, 1, 1], [7, 1, 16, 3, 33], [2, 0, 5, 0]])
def test_discounted_sums_are_those_of_a_plain_loop(lengths, factor):
    g = torch.Generator().manual_seed(0)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long))
    values = torch.randn(sum(lengths), generator=g, dtype=torch.float64)
    expected = values.clone()
    for t in reversed(range(len(values) - 1)):
        if sequence[t] == sequence[t + 1]:
            expected[t] += factor * expected[t + 1]
    close(discounted_sum(values, sequence, factor), expected)


def test_a_bad_discount_is_refused():
    with pytest.raises(ValueError, match=r"at most 1, got 1\.5"):
        discounted_sum(f64([1, 2]), torch.tensor([0, 0]), 1.5)


def test_nothing_follows_the_last_token_of_a_sequence():
    close(following(f64([1, 2, 3, 4]), torch.tensor([0, 0, 2, 2])), [2, 0, 4, 0])
    assert following(f64([]), torch.zeros(0, dtype=torch.long)).shape == (0,)


# REINFORCE++ ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("c", cases("reinforce_pp"), ids=lambda c: c["name"])
def test_reinforce_pp_golden(c):
    i, expect = c["input"], c["expect"]
    out = reinforce_pp_advantage(token_inputs(i["mask"], i["token_rewards"]), gamma=i["gamma"])
    close(out.advantages, flat(i["mask"], expect["advantages"])[1])
    if "returns" in expect:
        close(out.returns, flat(i["mask"], expect["returns"])[1])


def test_a_tool_gap_hides_no_reward():
    close(reinforce_pp_advantage(token_inputs([[1, 0, 0, 1]], [[0, 0, 0, 1]])).returns, [1, 1])


@pytest.mark.parametrize("c", cases("reinforce_pp_baseline"), ids=lambda c: c["name"])
def test_reinforce_pp_baseline_golden(c):
    i = c["input"]
    sample_level = AdvantageInputs(rewards=f64(i["rewards"]), groups=group_numbers(i["group"]))
    each = dr_grpo_advantage(sample_level).advantages
    spread = (each[:, None] * torch.ones_like(f64(i["mask"]))).tolist()
    out = reinforce_pp_baseline_advantage(token_inputs(i["mask"], advantages=spread))
    close(out.advantages, flat(i["mask"], c["expect"]["advantages"])[1])


# GAE ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("c", cases("gae"), ids=lambda c: c["name"])
def test_gae_golden(c):
    i, expect = c["input"], c["expect"]
    inputs = token_inputs(i["mask"], i["token_rewards"], values=i["values"])
    raw = gae_advantage(inputs, gamma=i["gamma"], lam=i["lam"], whiten=False)
    close(raw.advantages, flat(i["mask"], expect["advantages_raw_masked"])[1])
    close(raw.returns, flat(i["mask"], expect["returns_masked"])[1])
    whitened = gae_advantage(inputs, gamma=i["gamma"], lam=i["lam"])
    close(whitened.returns, raw.returns)
    if "advantages_whitened_masked" in expect:
        close(whitened.advantages, flat(i["mask"], expect["advantages_whitened_masked"])[1])


def test_gae_passes_over_tool_tokens_as_if_they_were_not_there():
    i = case("gae", "tool_tokens_skipped")["input"]
    kept = [t for t, m in enumerate(i["mask"][0]) if m]
    gapless = token_inputs(
        [[1] * len(kept)],
        [[i["token_rewards"][0][t] for t in kept]],
        values=[[i["values"][0][t] for t in kept]],
    )
    gap = token_inputs(i["mask"], i["token_rewards"], values=i["values"])
    for options in ({"gamma": 1.0, "lam": 0.95}, {"gamma": 0.9, "lam": 0.5}, {"gamma": 0.0}):
        close(gae_advantage(gap, **options).advantages, gae_advantage(gapless, **options).advantages)


def test_gae_pays_no_heed_to_sample_level_advantages():
    mask, rewards, values = [[1, 1]], [[0, 1]], [[0.2, 0.7]]
    plain = gae_advantage(token_inputs(mask, rewards, values=values))
    close(gae_advantage(token_inputs(mask, rewards, [[9, 9]], values=values)).advantages, plain.advantages)


@pytest.mark.parametrize("whiten", [True, False])
def test_rows_that_no_critic_scored_leave_the_others_alone(whiten):
    mask, rewards, values = [[1, 1, 1], [1, 1, 0]], [[0, 0, 1], [0, -1, 0]], [[0.1, 0.2, 0.3], [0.3, 0.1, 0]]
    alone = gae_advantage(token_inputs(mask[:1], rewards[:1], values=values[:1]), whiten=whiten)
    both = gae_advantage(token_inputs(mask, rewards, values=[values[0], [NAN, NAN, 0]]), whiten=whiten)
    close(both.advantages, [*alone.advantages.tolist(), 0, 0])
    close(both.returns[:3], alone.returns)
    assert both.returns[3:].isnan().all()


def test_gae_reads_the_column_that_it_is_told():
    with pytest.raises(ValueError, match=r"gae_advantage reads the column 'v'.*there are: values"):
        gae_advantage(token_inputs([[1]], values=[[0]]), values="v")


# On-policy distillation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("c", [c for c in cases("opd") if "advantages" in c["expect"]], ids=lambda c: c["name"])
def test_opd_golden(c):
    i = c["input"]
    inputs = token_inputs(
        i["mask"],
        advantages=i["advantages"],
        rollout=i["student_logprob"],
        teacher_logprobs=i["teacher_logprob"],
    )
    close(opd_advantage(inputs, coef=i["coef"]).advantages, flat(i["mask"], c["expect"]["advantages"])[1])


def test_tokens_that_no_teacher_scored_keep_their_advantage():
    inputs = token_inputs(
        [[1, 1], [1, 0]], advantages=[[1, 2], [3, 0]], rollout=[[-1, -2], [-3, 0]], t=[[-2, -1.5], [NAN, 0]]
    )
    out = opd_advantage(inputs, teacher="t")
    close(out.advantages, [0, 2.5, 3])
    assert out.metrics == {"opd_kl": pytest.approx(0.25), "opd_scored": pytest.approx(2 / 3)}


# Ranks ----------------------------------------------------------------------------------------------------------------


def batch() -> TokenInputs:
    g = torch.Generator().manual_seed(3)
    sequence = torch.repeat_interleave(torch.arange(6), torch.tensor([4, 1, 9, 2, 1, 6]))

    def random() -> torch.Tensor:
        return torch.randn(len(sequence), generator=g, dtype=torch.float64)

    return TokenInputs(
        rewards=random(),
        advantages=random(),
        rollout_logprobs=-random().abs(),
        sequence=sequence,
        columns={"values": random(), "teacher_logprobs": -random().abs()},
    )


ESTIMATORS = [reinforce_pp_advantage, reinforce_pp_baseline_advantage, gae_advantage, opd_advantage]


@pytest.mark.parametrize("bounds", [(0, 3, 6), (0, 6, 6), (0, 1, 2, 6)], ids=["two", "one idle", "three"])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: e.__name__)
def test_several_ranks_say_what_one_says(estimator, bounds):
    whole, parts = estimator(batch()), on_ranks(estimator, cut(batch(), *bounds))
    close(torch.cat([part.advantages for part in parts]), whole.advantages)
    if whole.returns is not None:
        close(torch.cat([part.returns for part in parts]), whole.returns)
    for part in parts:
        assert part.metrics == pytest.approx(whole.metrics)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: e.__name__)
def test_ranks_that_share_one_token_or_none(estimator):
    for bounds, mine in (((0, 0, 0), 0), ((1, 2, 2), 1)):
        parts = on_ranks(estimator, cut(batch(), *bounds))
        assert [len(part.advantages) for part in parts] == [mine, 0]
        if estimator is not opd_advantage:  # which is not whitened
            assert (torch.cat([part.advantages for part in parts]) == 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: e.__name__)
def test_float32_stays_float32_and_is_whitened_in_float64(estimator):
    wide = batch()
    far = replace(wide, advantages=wide.advantages + 1e4, rewards=wide.rewards + 1e3)
    narrow = replace(
        far,
        **{name: getattr(far, name).float() for name in ("rewards", "advantages", "rollout_logprobs")},
        columns={name: values.float() for name, values in far.columns.items()},
    )
    out = estimator(narrow)
    assert out.advantages.dtype == torch.float32 and estimator(wide).advantages.dtype == torch.float64
    torch.testing.assert_close(out.advantages.double(), estimator(far).advantages, rtol=1e-3, atol=1e-3)
