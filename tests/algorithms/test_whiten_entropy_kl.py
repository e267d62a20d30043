import pytest
import torch

from meshy.algorithms import logprobs as module
from meshy.algorithms.kl import kl_estimate
from meshy.algorithms.logprobs import entropy, token_logprobs
from meshy.algorithms.whiten import masked_whiten
from tests.algorithms.golden_cases import cases, close, f64


@pytest.mark.parametrize("c", cases("masked_whiten"), ids=lambda c: c["name"])
def test_masked_whiten(c):
    close(masked_whiten(f64(c["input"]["x"]), f64(c["input"]["mask"]).bool()), c["expect"]["y"])


def test_masked_whiten_of_one_entry_is_zero():
    assert (masked_whiten(torch.tensor([3.0, 9.0]), torch.tensor([True, False])) == 0).all()


@pytest.mark.parametrize("rows_at_once", [1, 2, 100])
@pytest.mark.parametrize("c", cases("entropy"), ids=lambda c: c["name"])
def test_entropy(c, rows_at_once, monkeypatch):
    logits = f64(c["input"]["logits"])
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", rows_at_once * logits.shape[1])
    close(entropy(logits), c["expect"]["entropy"])


@pytest.mark.parametrize("rows_at_once", [2, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_equal_log_softmax(rows_at_once, temperature, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", rows_at_once * 11)
    g = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(7, 11, generator=g, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(0, 11, (7,), generator=g)
    weight = torch.randn(7, generator=g, dtype=torch.float64)
    reference = (logits / temperature).log_softmax(1)
    logprobs, entropies = token_logprobs(logits, targets, temperature)
    close(logprobs.detach(), reference.gather(1, targets[:, None])[:, 0].detach())
    close(entropies, -(reference.exp() * reference).sum(1).detach())
    (grad,) = torch.autograd.grad((logprobs * weight).sum(), logits)
    (expected,) = torch.autograd.grad((reference.gather(1, targets[:, None])[:, 0] * weight).sum(), logits)
    close(grad, expected)
    assert not entropies.requires_grad


def test_token_logprobs_of_no_token_and_of_masked_vocabulary():
    logits = torch.zeros(0, 5, requires_grad=True)
    logprobs, _ = token_logprobs(logits, torch.zeros(0, dtype=torch.long))
    logprobs.sum().backward()
    assert logits.grad.shape == (0, 5)
    masked = torch.tensor([[0.0, 0.0, float("-inf")]])
    assert entropy(masked).item() == pytest.approx(0.6931472)


def test_temperature_zero_is_refused():
    with pytest.raises(ValueError, match="temperature must be positive"):
        token_logprobs(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), 0.0)


@pytest.mark.parametrize("c", [c for c in cases("kl") if c["name"] in ("k1", "k2", "k3")], ids=lambda c: c["name"])
def test_kl(c):
    logprob = f64(c["input"]["logprob"]).requires_grad_()
    kl = kl_estimate(logprob, f64(c["input"]["ref_logprob"]), c["name"])
    close(kl.detach(), c["expect"]["kl"])
    close(torch.autograd.grad(kl.sum(), logprob)[0], c["expect"]["d_kl_d_logprob"])
