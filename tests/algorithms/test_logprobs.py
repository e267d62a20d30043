import pytest
import torch

from meshy.algorithms import logprobs as module
from meshy.algorithms.logprobs import candidate_logprobs, entropy, in_chunks, token_logprobs
from tests.algorithms.golden_cases import cases, close, f64


def random_logits(tokens=7, vocab=11, scale=5.0):
    g = torch.Generator().manual_seed(0)
    return (scale * torch.randn(tokens, vocab, generator=g, dtype=torch.float64)).requires_grad_(), g


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
    logits, g = random_logits()
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
    with pytest.raises(ValueError, match="temperature must be positive"):
        candidate_logprobs(torch.zeros(1, 2), torch.zeros(1, 1, dtype=torch.long), 0.0)


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
@pytest.mark.parametrize("candidates", [1, 4, 11])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_candidate_logprobs_equal_log_softmax(candidates, rows_at_once, ids_dtype, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", rows_at_once * 11)
    logits, g = random_logits()
    ids = torch.stack([torch.randperm(11, generator=g)[:candidates] for _ in range(7)])
    weight = torch.randn(7, candidates, generator=g, dtype=torch.float64)
    expected = (logits / 0.7).log_softmax(1).gather(1, ids)
    ours = candidate_logprobs(logits, ids.to(ids_dtype), 0.7)
    assert ours.dtype == torch.float64
    close(ours.detach(), expected.detach())
    close(*(torch.autograd.grad((x * weight).sum(), logits)[0] for x in (ours, expected)))
    assert torch.autograd.gradcheck(lambda x: candidate_logprobs(x, ids, 0.7), (logits,))


def test_a_candidate_that_comes_twice_has_the_gradient_of_both():
    logits, _ = random_logits(1, 4)
    (grad,) = torch.autograd.grad(candidate_logprobs(logits, torch.tensor([[2, 2]])).sum(), logits)
    (once,) = torch.autograd.grad(candidate_logprobs(logits, torch.tensor([[2]])).sum(), logits)
    close(grad, 2 * once)


@pytest.mark.parametrize("width", [0, 3])
def test_candidate_logprobs_of_no_token(width):
    logits = torch.zeros(0, 5, requires_grad=True)
    candidate_logprobs(logits, torch.zeros(0, width, dtype=torch.int32)).sum().backward()
    assert logits.grad.shape == (0, 5)


def test_log_probs_of_bfloat16_logits_are_float32_and_their_gradient_is_bfloat16():
    wide, _ = random_logits()
    logits = wide.detach().bfloat16().requires_grad_()
    logprobs = candidate_logprobs(logits, torch.arange(7)[:, None])
    assert logprobs.dtype == torch.float32
    logprobs.sum().backward()
    assert logits.grad.dtype == torch.bfloat16
    close(logprobs.detach(), logits.detach().double().log_softmax(1).gather(1, torch.arange(7)[:, None]))


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_a_function_of_rows_has_the_same_value_and_gradient_in_chunks(rows_at_once, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 8 * rows_at_once * 11)
    logits, g = random_logits(scale=1.0)
    other, scale = torch.randn(7, 11, generator=g, dtype=torch.float64), torch.rand(7, generator=g).double()
    seen = []

    def function(logits, other, scale):
        seen.append(len(logits))
        return scale * (logits.softmax(1) * other).sum(1)

    ours, expected = in_chunks(function, logits, other, scale), function(logits, other, scale)
    assert max(seen[:-1]) == min(rows_at_once, 7)
    close(ours.detach(), expected.detach())
    weight = torch.randn(7, generator=g, dtype=torch.float64)
    close(*(torch.autograd.grad((x * weight).sum(), logits)[0] for x in (ours, expected)))
    assert torch.autograd.gradcheck(lambda x: in_chunks(function, x, other, scale), (logits,))
