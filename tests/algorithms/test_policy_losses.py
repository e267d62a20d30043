"""GSPO, CISPO, SAPO and DPPO: golden cases, and gradients against differences or against the stated formula."""

from dataclasses import replace

import pytest
import torch

from meshy.algorithms.interface import LossConfig, LossInputs
from meshy.algorithms.losses.cispo import cispo_loss, cispo_token_loss
from meshy.algorithms.losses.dppo import dppo_loss, dppo_token_loss
from meshy.algorithms.losses.gspo import gspo_loss, gspo_token_loss
from meshy.algorithms.losses.ppo_clip import ppo_clip_loss, ppo_clip_token_loss
from meshy.algorithms.losses.sapo import sapo_loss, sapo_token_loss
from meshy.algorithms.sequences import sequence_mean
from tests.algorithms.golden_cases import cases, close, counts_of, f64, flat
from tests.algorithms.small_batch import POLICY_LOSSES, Batch, gradient, name_of, with_options

TAUS = {"tau_pos": 1.0, "tau_neg": 2.0}
TVS = {"tv_low": 0.2, "tv_high": 0.2, "kl_tau": 1e-3}


def golden(c):
    """(inputs, config, expected per-token values by name) of a case."""
    i = c["input"]
    new = "trainer_logprob" if "trainer_logprob" in i else "logprob"
    old = "inference_logprob" if "inference_logprob" in i else "old_logprob"
    sequence, logprobs, old_logprobs, advantages = flat(i["mask"], i[new], i[old], i["advantages"])
    inputs = LossInputs(
        logprobs=logprobs.requires_grad_(),
        old_logprobs=old_logprobs,
        rollout_logprobs=old_logprobs,
        advantages=advantages,
        sequence=sequence,
        counts=counts_of(i["mask"]),
    )
    config = LossConfig(clip_low=i.get("clip_low", 0), clip_high=i.get("clip_high", 0))
    shape = f64(i["mask"]).shape
    expected = {
        name: flat(i["mask"], value)[1] for name, value in c["expect"].items() if f64([value]).shape[1:] == shape
    }
    return inputs, config, expected


def clips(config):
    return {"clip_low": config.clip_low, "clip_high": config.clip_high}


def check(c, inputs, token_loss, marked, expected, loss):
    for name in ("token_loss", "token_loss_masked"):
        if name in expected:
            close(token_loss.detach(), expected[name])
    for name in ("clipped", "dropped"):
        if name in expected:
            close(marked, expected[name])
    for name in ("d_token_loss_d_logprob", "d_token_loss_d_own_logprob"):
        if name in expected:
            close(torch.autograd.grad(token_loss.sum(), inputs.logprobs)[0], expected[name])
    for how in ("token-mean", "seq-mean-token-mean"):
        if (wanted := c["expect"].get("loss_" + how.replace("-", "_"))) is not None:
            close(loss(how).detach(), wanted)
    assert expected


@pytest.mark.parametrize("c", cases("gspo"), ids=lambda c: c["name"])
def test_gspo_golden(c):
    inputs, config, expected = golden(c)
    token_loss, clipped = gspo_token_loss(
        inputs.logprobs, inputs.old_logprobs, inputs.advantages, inputs.sequence, **clips(config)
    )
    check(
        c, inputs, token_loss, clipped, expected, lambda how: gspo_loss(inputs, replace(config, aggregation=how)).loss
    )


@pytest.mark.parametrize("c", cases("cispo"), ids=lambda c: c["name"])
def test_cispo_golden(c):
    inputs, config, expected = golden(c)
    token_loss, clipped = cispo_token_loss(inputs.logprobs, inputs.old_logprobs, inputs.advantages, **clips(config))
    check(
        c, inputs, token_loss, clipped, expected, lambda how: cispo_loss(inputs, replace(config, aggregation=how)).loss
    )


@pytest.mark.parametrize("c", cases("sapo"), ids=lambda c: c["name"])
def test_sapo_golden(c):
    inputs, config, expected = golden(c)
    options = {name: c["input"][name] for name in TAUS}
    token_loss = sapo_token_loss(inputs.logprobs, inputs.old_logprobs, inputs.advantages, **options)
    config = replace(config, options=options)
    check(c, inputs, token_loss, None, expected, lambda how: sapo_loss(inputs, replace(config, aggregation=how)).loss)


@pytest.mark.parametrize("c", cases("dppo_binary_tv"), ids=lambda c: c["name"])
def test_dppo_golden(c):
    inputs, _, expected = golden(c)
    options = {"tv_low": c["input"]["low"], "tv_high": c["input"]["high"], "kl_tau": c["input"]["kl_tau"]}
    token_loss, dropped = dppo_token_loss(inputs.logprobs, inputs.rollout_logprobs, inputs.advantages, **options)
    check(c, inputs, token_loss, dropped, expected, None)
    summed = LossConfig(aggregation="seq-mean-token-sum-norm", aggregation_constant=1.0, options=options)
    out = dppo_loss(inputs, summed)
    close(out.loss.detach(), expected["token_loss"].sum())
    assert out.metrics["dppo_dropped"] == expected["dropped"].sum()


# Gradients ------------------------------------------------------------------------------------------------------------


def random_tokens(count: int = 24):
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(count, generator=g, dtype=torch.float64) - 0.1
    new = (old + 0.5 * torch.randn(count, generator=g, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(count, generator=g, dtype=torch.float64)
    return new, old, advantages, torch.arange(count) // 5


def test_gradients_that_are_those_of_the_value():
    new, old, advantages, _ = random_tokens()
    assert torch.autograd.gradcheck(lambda x: sapo_token_loss(x, old, advantages, **TAUS), (new,))
    assert torch.autograd.gradcheck(lambda x: dppo_token_loss(x, old, advantages, **TVS)[0], (new,))
    _, dropped = dppo_token_loss(new, old, advantages, **TVS)
    assert 0 < dropped.sum() < len(dropped)


def test_gradient_of_gspo_is_the_sequence_ratio_where_the_clip_does_not_bind():
    new, old, advantages, sequence = random_tokens()
    loss, clipped = gspo_token_loss(new, old, advantages, sequence, clip_low=0.1, clip_high=0.1)
    ratio = sequence_mean(new.detach() - old, sequence).exp()[sequence]
    assert 0 < clipped.sum() < len(clipped)
    close(torch.autograd.grad(loss.sum(), new)[0], torch.where(clipped, 0, -advantages * ratio))


def test_gspo_of_one_token_sequences_is_ppo():
    new, old, advantages, _ = random_tokens()
    alone = torch.arange(len(new))
    for options in ({"clip_low": 0.1, "clip_high": 0.3}, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.3}):
        ours, clipped = gspo_token_loss(new, old, advantages, alone, **options)
        theirs, where = ppo_clip_token_loss(new, old, advantages, **options)
        close(ours.detach(), theirs.detach())
        assert torch.equal(clipped, where)
        close(*(torch.autograd.grad(loss.sum(), new)[0] for loss in (ours, theirs)))


def test_gradient_of_cispo_is_the_clipped_weight_on_either_side():
    new, old, advantages, _ = random_tokens()
    for low, high in ((0.2, 0.28), (1.0, 0.5)):
        loss, clipped = cispo_token_loss(new, old, advantages, clip_low=low, clip_high=high)
        weight = (new.detach() - old).exp().clamp(1 - low, 1 + high)
        assert clipped.any()
        close(torch.autograd.grad(loss.sum(), new)[0], -advantages * weight)


def test_advantage_zero_takes_the_negative_branch():
    """As golden notes say of SAPO's temperature and of DPPO's bound."""
    new, old, zero = f64([-2.0]), f64([-0.1]), f64([0.0])
    assert sapo_token_loss(new, old, zero, tau_pos=1.0, tau_neg=2.0) == 0
    assert dppo_token_loss(new, old, zero, tv_low=0.2, tv_high=5.0, kl_tau=0.0)[1].all()
    assert not dppo_token_loss(old, new, zero, tv_low=5.0, tv_high=0.2, kl_tau=0.0)[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ratios_however_large_stay_finite(dtype):
    new = torch.tensor([-1000.0, 0.0, -300.0, 0.0], dtype=dtype).requires_grad_()
    old = torch.tensor([0.0, -1000.0, 0.0, -300.0], dtype=dtype)
    advantages, sequence = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=dtype), torch.arange(4)
    clip = {"clip_low": 0.2, "clip_high": 0.28}
    for loss in (
        gspo_token_loss(new, old, advantages, sequence, **clip)[0],
        cispo_token_loss(new, old, advantages, **clip)[0],
        sapo_token_loss(new, old, advantages, **TAUS),
        dppo_token_loss(new, old, advantages, **TVS)[0],
    ):
        assert loss.isfinite().all() and torch.autograd.grad(loss.sum(), new)[0].isfinite().all()


@pytest.mark.parametrize("loss", POLICY_LOSSES, ids=name_of)
def test_who_says_that_it_vanishes_at_zero_advantage_does(loss):
    batch = Batch()
    resting = batch.sequence == 2
    batch.advantages[resting] = 0.0
    _, grad = gradient(loss, batch)
    assert (grad[~resting] != 0).any()
    assert bool((grad[resting] == 0).all()) == getattr(loss, "vanishes_at_zero_advantage", False)
    assert (loss is dppo_loss) != getattr(loss, "vanishes_at_zero_advantage", False)


def test_metrics_are_token_sums():
    batch = Batch(spread=0.6)
    for loss in (ppo_clip_loss, gspo_loss, cispo_loss):
        metrics = loss(batch.inputs(loss), LossConfig()).metrics
        assert 0 < metrics["clip_fraction"] < batch.counts.tokens and metrics["ppo_kl"] > 0
    assert sapo_loss(batch.inputs(sapo_loss), LossConfig()).metrics["ppo_kl"] > 0


def test_bad_options_are_refused():
    batch = Batch()
    with pytest.raises(ValueError, match=r"sapo_loss has no option 'tau'.*tau_pos \(default 1\.0\)"):
        sapo_loss(batch.inputs(sapo_loss), with_options(tau=1.0))
    with pytest.raises(ValueError, match="must be positive, got 0 and"):
        sapo_loss(batch.inputs(sapo_loss), with_options(tau_pos=0))
    with pytest.raises(ValueError, match="dppo_loss has no option 'clip'"):
        dppo_loss(batch.inputs(dppo_loss), with_options(clip=0.2))
