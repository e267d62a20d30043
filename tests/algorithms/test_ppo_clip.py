import pytest
import torch

from meshy.algorithms.interface import GlobalCounts, LossConfig, LossInputs
from meshy.algorithms.losses.ppo_clip import ppo_clip_loss, ppo_clip_token_loss
from tests.algorithms.golden_cases import case, cases, close, f64


def inputs(c, logprobs=None):
    i = c["input"]
    mask = f64(i["mask"]).bool()
    sequence = torch.arange(mask.shape[0])[:, None].expand_as(mask)[mask]
    logprobs = f64(i["logprob"]) if logprobs is None else logprobs
    old = f64(i["old_logprob"])[mask]
    counts = GlobalCounts(tokens=int(mask.sum()), sequences=int(mask.any(1).sum()))
    return LossInputs(
        logprobs=logprobs[mask],
        old_logprobs=old,
        rollout_logprobs=old,
        advantages=f64(i["advantages"])[mask],
        sequence=sequence,
        counts=counts,
    )


def config(c):
    i = c["input"]
    return LossConfig(clip_low=i["clip_low"], clip_high=i["clip_high"], dual_clip=i["dual_clip_c"])


@pytest.mark.parametrize("c", cases("ppo_clip"), ids=lambda c: c["name"])
def test_golden(c):
    i, expect = c["input"], c["expect"]
    logprobs = f64(i["logprob"]).requires_grad_()
    token_loss, clipped = ppo_clip_token_loss(
        logprobs,
        f64(i["old_logprob"]),
        f64(i["advantages"]),
        clip_low=i["clip_low"],
        clip_high=i["clip_high"],
        dual_clip=i["dual_clip_c"],
    )
    if "token_loss" in expect:
        close(token_loss, expect["token_loss"])
    if "clipped" in expect:
        close(clipped, expect["clipped"])
    if "d_token_loss_d_logprob" in expect:
        close(torch.autograd.grad(token_loss.sum(), logprobs)[0], expect["d_token_loss_d_logprob"])
    if "loss_token_mean" in expect:
        close(ppo_clip_loss(inputs(c), config(c)).loss, expect["loss_token_mean"])


def test_all_masked_is_a_finite_zero_that_still_back_propagates():
    c = case("ppo_clip", "all_masked")
    logprobs = f64(c["input"]["logprob"]).requires_grad_()
    loss = ppo_clip_loss(inputs(c, logprobs), config(c)).loss
    loss.backward()
    assert loss.item() == 0 and (logprobs.grad == 0).all()


def test_metrics_are_token_sums():
    c = case("ppo_clip", "symmetric_0.2")
    metrics = ppo_clip_loss(inputs(c), config(c)).metrics
    assert metrics["clip_fraction"] == sum(map(sum, c["expect"]["clipped"]))
    assert metrics["ppo_kl"] > 0


def test_gradient_matches_finite_differences():
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(16, generator=g, dtype=torch.float64)
    new = (old + 0.4 * torch.randn(16, generator=g, dtype=torch.float64)).requires_grad_()
    advantage = torch.randn(16, generator=g, dtype=torch.float64)

    def loss(x):
        return ppo_clip_token_loss(x, old, advantage, clip_low=0.2, clip_high=0.28, dual_clip=3.0)[0]

    assert torch.autograd.gradcheck(loss, (new,))
