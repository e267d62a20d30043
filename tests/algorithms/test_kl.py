"""KL estimates: by themselves, as a loss, and inside the reward."""

import subprocess
import sys

import pytest
import torch

from meshy.algorithms.interface import LossConfig
from meshy.algorithms.kl import kl_estimate
from meshy.algorithms.kl_reward import KLInReward, adapted
from meshy.algorithms.losses.kl_loss import kl_loss
from meshy.algorithms.token_rewards import at_last_tokens, token_rewards
from tests.algorithms.golden_cases import case, cases, close, f64, flat
from tests.algorithms.small_batch import Batch, gradient, with_options

KINDS = ["k1", "k2", "k3", "low_var", "k3_k2_gradient"]
NAN = float("nan")


def kind_of(name: str) -> str:
    return {"low_var_kl": "low_var", "k3+": "k3_k2_gradient"}.get(name, name)


@pytest.mark.parametrize("c", cases("kl"), ids=lambda c: c["name"])
def test_golden(c):
    i, expect = c["input"], c["expect"]
    if c["name"] == "equal_policies":
        for name, values in expect.items():
            close(kl_estimate(f64(i["logprob"]), f64(i["ref_logprob"]), kind_of(name)), values)
        return
    logprob = f64(i["logprob"]).requires_grad_()
    kl = kl_estimate(logprob, f64(i["ref_logprob"]), kind_of(c["name"]))
    close(kl.detach(), expect["kl"])
    if "d_kl_d_logprob" in expect:
        close(torch.autograd.grad(kl.sum(), logprob)[0], expect["d_kl_d_logprob"])


def pair(count=12):
    g = torch.Generator().manual_seed(0)
    new, ref = (-3 * torch.rand(count, generator=g, dtype=torch.float64) for _ in range(2))
    return new.requires_grad_(), ref


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_gradients_are_those_of_the_value(kind):
    new, ref = pair()
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref, kind), (new,))


def test_k3_with_the_gradient_of_k2():
    new, ref = pair()
    both = kl_estimate(new, ref, "k3_k2_gradient")
    close(both.detach(), kl_estimate(new, ref, "k3").detach())
    close(torch.autograd.grad(both.sum(), new)[0], new.detach() - ref)


def test_low_var_is_bounded_however_far_apart():
    new = torch.tensor([0.0, -1000.0, -11.0], requires_grad=True)
    kl = kl_estimate(new, torch.tensor([-1000.0, 0.0, -11.0]), "low_var")
    close(kl.detach(), [10, 10, 0])
    assert torch.autograd.grad(kl.sum(), new)[0].tolist() == [0, 0, 0]


def test_on_average_k2_has_the_gradient_of_the_kl_and_k1_has_none():
    """Over all tokens with their probabilities: exact, no sampling."""
    g = torch.Generator().manual_seed(0)
    logits, ref = torch.randn(9, generator=g).double().requires_grad_(), torch.randn(9, generator=g).double()
    logprobs, ref = logits.log_softmax(0), ref.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True)

    def expected_gradient(kind):
        weight = logprobs.detach().exp()
        return torch.autograd.grad((weight * kl_estimate(logprobs, ref, kind)).sum(), logits, retain_graph=True)[0]

    close(expected_gradient("k2"), exact)
    close(expected_gradient("k3_k2_gradient"), exact)
    close(expected_gradient("k1"), [0.0] * 9)
    (forward,) = torch.autograd.grad((ref.exp() * (ref - logprobs)).sum(), logits, retain_graph=True)
    close(expected_gradient("k3"), forward)


def test_k1_in_a_loss_is_blind_to_the_reference_and_refused():
    new, ref = pair()
    for reference in (ref, ref - 7):
        assert (torch.autograd.grad(kl_estimate(new, reference, "k1").sum(), new)[0] == 1).all()
    with pytest.raises(ValueError, match=r"gradient 1 .* k2, k3"):
        kl_loss(Batch().inputs(kl_loss), with_options(kind="k1"))
    with pytest.raises(ValueError, match="has no kind 'k4'; choose one of k2, k3"):
        kl_loss(Batch().inputs(kl_loss), with_options(kind="k4"))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_kl_loss_is_the_estimate_aggregated(kind):
    batch = Batch()
    columns = {"other": batch.columns["ref_logprobs"] - 0.5}
    config = LossConfig(options={"kind": kind, "reference": "other"})
    inputs = batch.inputs(kl_loss, **columns)
    out = kl_loss(inputs, config)
    expected = kl_estimate(inputs.logprobs, columns["other"], kind)
    close(out.loss, expected.sum() / batch.counts.tokens)
    close(out.metrics["ref_kl"], expected.sum())


def test_gradient_of_kl_loss_leads_to_the_reference():
    batch = Batch()
    value, grad = gradient(kl_loss, batch)
    batch.logits = batch.logits - 0.5 * grad
    assert gradient(kl_loss, batch)[0] < value


# Inside the reward ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "c", [c for c in cases("kl_in_reward") if "token_rewards" in c["expect"]], ids=lambda c: c["name"]
)
def test_kl_in_reward_golden(c):
    i = c["input"]
    _, scores, logprobs, ref, expected = flat(
        i["mask"], i["token_scores"], i["logprob"], i["ref_logprob"], c["expect"]["token_rewards"]
    )
    close(token_rewards(scores, logprobs, ref, coef=i["beta"], kind=kind_of(i["kind"]))[0], expected)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_the_penalty_is_the_estimate_times_the_coefficient(kind):
    new, ref = pair()
    scores = torch.arange(12).double()
    rewards, kl = token_rewards(scores, new, ref, coef=0.3, kind=kind)
    close(kl, kl_estimate(new, ref, kind).detach())
    close(rewards, scores - 0.3 * kl)
    assert not rewards.requires_grad


def test_tokens_that_no_reference_scored_keep_their_reward():
    rewards, kl = token_rewards(f64([1, 2]), f64([-1, -1]), f64([NAN, -2]), coef=0.5)
    close(rewards, [1, 1.5])
    assert kl.isnan().tolist() == [True, False]


def test_a_reward_comes_with_the_last_token():
    close(at_last_tokens(f64([5, 6, 7]), torch.tensor([0, 0, 2, 2, 2])), [0, 5, 0, 0, 7])
    assert at_last_tokens(f64([5]), torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_the_adaptive_controller_golden():
    c = case("kl_in_reward", "adaptive_controller")
    i, coef = c["input"], c["input"]["coef"]
    for (kl, samples), after in zip(i["updates"], c["expect"]["coef_after"], strict=True):
        coef = adapted(coef, kl, samples, i["target"], i["horizon"])
        assert coef == pytest.approx(after, abs=1e-12)


def test_a_horizon_too_near_is_refused():
    assert adapted(1.0, 0.0, 499, 1.0, 100) > 0
    with pytest.raises(ValueError, match="horizon must be more than 100 samples"):
        adapted(1.0, 0.0, 500, 1.0, 100)


def test_faults_of_kl_in_reward():
    assert KLInReward(coef=0.001).faults() == []
    assert KLInReward(coef=0.001, target=0.1).faults() == []
    bad = KLInReward(reference="", coef=-1, kind="low_var", target=0, horizon=0)  # type: ignore[arg-type]
    assert [fault.split(":")[0] for fault in bad.faults()] == [
        f"kl_in_reward.{name}" for name in ("reference", "coef", "kind", "target", "horizon")
    ]
    assert "with a target" in KLInReward(coef=0, target=0.1).faults()[0]


def test_settings_need_no_torch():
    code = "import sys, meshy.algorithms.kl_reward, meshy.algorithms.overlong; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
