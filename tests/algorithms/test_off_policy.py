"""The factor on advantages, alone and through the policy loss."""

from dataclasses import replace

import pytest
import torch

from meshy.algorithms.correction import Correction
from meshy.algorithms.importance import bounded_weights, importance_ratios
from meshy.algorithms.interface import LossConfig, LossInputs
from meshy.algorithms.losses.ppo_clip import ppo_clip_loss, ppo_clip_token_loss
from meshy.algorithms.off_policy import off_policy_factor
from tests.algorithms.golden_cases import cases, close, counts_of, flat

ACTIONS = {"mask": "mask", "clamp": "truncate"}
EVERYTHING = Correction(
    importance="geometric", high=1.3, veto=0.4, reject="token_k2", reject_high=0.4, opsm=0.05, action="mask"
)


def decoupled(c) -> tuple[LossInputs, Correction]:
    i = c["input"]
    sequence, logprobs, prox, behave, advantages = flat(
        i["mask"], i["logprob"], i["prox_logprob"], i["behave_logprob"], i["advantages"]
    )
    inputs = LossInputs(
        logprobs=logprobs.requires_grad_(),
        old_logprobs=prox,
        rollout_logprobs=behave,
        advantages=advantages,
        sequence=sequence,
        counts=counts_of(i["mask"]),
    )
    return inputs, Correction(importance="token", action=ACTIONS[i["action"]], high=i["cap"])


def factor_of(inputs: LossInputs, correction: Correction):
    return off_policy_factor(
        correction,
        logprobs=inputs.logprobs,
        train_logprobs=inputs.old_logprobs,
        rollout_logprobs=inputs.rollout_logprobs,
        advantages=inputs.advantages,
        sequence=inputs.sequence,
    )


@pytest.mark.parametrize("c", cases("decoupled_ppo"), ids=lambda c: c["name"])
def test_decoupled_ppo_is_the_clipped_loss_with_advantages_times_the_weight(c):
    inputs, correction = decoupled(c)
    ratios = importance_ratios(inputs.old_logprobs, inputs.rollout_logprobs, inputs.sequence, "token")
    weights, keep = bounded_weights(ratios, correction.action, None, correction.high)
    _, behave_weight, mask_after = flat(c["input"]["mask"], c["expect"]["behave_weight"], c["expect"]["mask_after"])
    close(weights, behave_weight)
    close(keep, mask_after)

    factor, _ = factor_of(inputs, correction)
    config = LossConfig(clip_low=c["input"]["clip"], clip_high=c["input"]["clip"])
    loss = ppo_clip_loss(replace(inputs, advantages=inputs.advantages * factor), config).loss
    close(loss.detach(), c["expect"]["loss"])

    token_loss, _ = ppo_clip_token_loss(
        inputs.logprobs, inputs.old_logprobs, inputs.advantages, clip_low=0.2, clip_high=0.2
    )
    weighted = (token_loss * factor).sum() / inputs.counts.tokens
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    (expected,) = torch.autograd.grad(weighted, inputs.logprobs)
    close(gradient, expected)


def random_inputs(lengths=(3, 0, 5, 1, 8, 2), seed=4) -> LossInputs:
    g = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    logprobs = -torch.rand(count, generator=g, dtype=torch.float64) * 3

    def near(spread):
        return logprobs + spread * torch.randn(count, generator=g, dtype=torch.float64)

    return LossInputs(
        logprobs=logprobs,
        old_logprobs=near(0.1),
        rollout_logprobs=near(0.8),
        advantages=torch.randn(count, generator=g, dtype=torch.float64),
        sequence=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        counts=counts_of([[1] * n + [0] * (max(lengths) - n) for n in lengths]),
    )


def part(inputs: LossInputs, sequences: list[int]) -> LossInputs:
    """The same tokens as a micro-batch of these sequences."""
    chosen = torch.isin(inputs.sequence, torch.tensor(sequences))
    number = {old: new for new, old in enumerate(sequences)}
    fields = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages")
    sequence = torch.tensor([number[s] for s in inputs.sequence[chosen].tolist()], dtype=torch.long)
    return replace(inputs, sequence=sequence, **{name: getattr(inputs, name)[chosen] for name in fields})


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_a_factor_on_advantages_weights_the_token_loss_whatever_the_aggregation(aggregation, dual_clip):
    inputs = random_inputs()
    factor, sums = factor_of(inputs, EVERYTHING)
    assert all(0 < sums[name] < inputs.counts.tokens for name in ("masked", "rejected", "opsm", "vetoed", "dropped"))
    settings = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": dual_clip}
    one, _ = ppo_clip_token_loss(inputs.logprobs, inputs.old_logprobs, inputs.advantages, **settings)
    other, _ = ppo_clip_token_loss(inputs.logprobs, inputs.old_logprobs, inputs.advantages * factor, **settings)
    close(other, one * factor)
    config = LossConfig(aggregation=aggregation, **settings)
    whole = ppo_clip_loss(replace(inputs, advantages=inputs.advantages * factor), config).loss
    lengths = torch.bincount(inputs.sequence).double()[inputs.sequence]
    by_hand = {
        "token-mean": (one * factor).sum() / inputs.counts.tokens,
        "seq-mean-token-sum": (one * factor).sum() / inputs.counts.sequences,
        "seq-mean-token-mean": (one * factor / lengths).sum() / inputs.counts.sequences,
    }
    close(whole, by_hand[aggregation])


@pytest.mark.parametrize("cut", [[[0, 1, 2, 3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[5, 0], [], [1, 4], [2, 3]]])
def test_sums_and_loss_do_not_depend_on_how_the_batch_is_cut(cut):
    inputs = random_inputs()
    whole, sums = factor_of(inputs, EVERYTHING)
    expected = ppo_clip_loss(replace(inputs, advantages=inputs.advantages * whole), LossConfig()).loss
    total, loss = dict.fromkeys(sums, 0.0), 0.0
    for sequences in cut:
        piece = part(inputs, sorted(sequences))
        factor, said = factor_of(piece, EVERYTHING)
        assert said.keys() == total.keys()  # also where no token is
        total = {name: total[name] + float(value) for name, value in said.items()}
        loss += ppo_clip_loss(replace(piece, advantages=piece.advantages * factor), LossConfig()).loss
    close(loss, expected)
    for name, value in sums.items():
        assert total[name] == pytest.approx(float(value)), name


def test_dropped_counts_each_token_once():
    inputs = random_inputs()
    factor, sums = factor_of(inputs, EVERYTHING)
    assert sums["dropped"] == (factor == 0).sum()
    assert sums["weight"] == factor.sum() and sums["weight_squared"] == factor.square().sum()


def test_truncated_tokens_are_counted_and_kept():
    inputs = random_inputs()
    ratio = (inputs.old_logprobs - inputs.rollout_logprobs).exp()
    _, sums = factor_of(inputs, Correction(importance="token", low=0.5, high=2.0))
    assert sums["truncated"] == ((ratio < 0.5) | (ratio > 2.0)).sum() > 0 == sums["dropped"]


def test_each_rule_alone_reports_itself_only():
    inputs = random_inputs()
    for correction, names in (
        (Correction(importance="token"), {"truncated"}),
        (Correction(importance="token", action="mask"), {"masked"}),
        (Correction(veto=1e-4), {"vetoed"}),
        (Correction(reject="seq_mean_k3", reject_high=0.1), {"rejected"}),
        (Correction(opsm=1e-4), {"opsm"}),
    ):
        _, sums = factor_of(inputs, correction)
        assert sums.keys() == {"weight", "weight_squared", "dropped"} | names


def test_a_batch_that_is_dropped_whole_gives_loss_zero_and_still_back_propagates():
    inputs = random_inputs()
    logprobs = inputs.logprobs.requires_grad_()
    factor, sums = factor_of(inputs, Correction(veto=0.999, reject="seq_mean_k2", reject_high=0.0))
    assert (factor == 0).all() and sums["dropped"] == inputs.counts.tokens
    loss = ppo_clip_loss(replace(inputs, advantages=inputs.advantages * factor), LossConfig()).loss
    loss.backward()
    assert loss == 0 and (logprobs.grad == 0).all()


def test_a_token_without_advantage_stays_without():
    inputs = random_inputs()
    factor, _ = factor_of(replace(inputs, rollout_logprobs=inputs.rollout_logprobs - 1e6), Correction(
        importance="sequence", high=None
    ))  # fmt: skip
    assert (torch.zeros_like(factor) * factor == 0).all()
