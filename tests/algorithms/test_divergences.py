"""Divergences by themselves: golden numbers, the ends of every option, and zero probabilities."""

import math

import pytest
import torch

from meshy.algorithms.divergences import divergence
from tests.algorithms.golden_cases import cases, close, f64

KINDS = [("reverse", 0.5), ("forward", 0.5), ("jsd", 0.5), ("jsd", 0.9)]
TAILS = ["drop", "rest", "renormalise"]
INF = math.inf
every_kind = pytest.mark.parametrize(("kind", "beta"), KINDS, ids=str)


def pair(tokens=6, vocab=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple((2 * torch.randn(tokens, vocab, generator=g, dtype=torch.float64)).log_softmax(1) for _ in range(2))


def top(student, teacher, k):
    ids = teacher.topk(k).indices
    return student.gather(1, ids), teacher.gather(1, ids)


def kind_of(name: str) -> str:
    return next(kind for kind in ("reverse", "forward", "jsd") if kind in name)


@pytest.mark.parametrize("c", [c for c in cases("opd") if "full_vocab" in c["name"]], ids=lambda c: c["name"])
def test_golden(c):
    student, teacher = (f64(c["input"][name]).log_softmax(1) for name in ("student_logits", "teacher_logits"))
    for tail in TAILS:  # nothing lies beyond the whole vocabulary
        value = divergence(student, teacher, kind_of(c["name"]), beta=c["input"].get("beta", 0.5), tail=tail)
        close(value, c["expect"].get("kl", c["expect"].get("jsd")))


@pytest.mark.parametrize("c", [c for c in cases("opd") if "_top" in c["name"]], ids=lambda c: c["name"])
def test_candidates_golden(c):
    i, ids = c["input"], torch.tensor(c["expect"]["ids"])
    student, teacher = (f64(i[name]).log_softmax(1).gather(1, ids) for name in ("student_logits", "teacher_logits"))
    close(
        divergence(student, teacher, kind_of(c["name"]), logprob_min=i["logprob_min"], cap=i["cap"]), c["expect"]["kl"]
    )


@every_kind
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("k", [1, 3, 5])
def test_gradient(kind, beta, tail, k):
    student, teacher = top(*pair(), k)
    assert torch.autograd.gradcheck(
        lambda x: divergence(x, teacher, kind, beta=beta, tail=tail), (student.requires_grad_(),), atol=1e-4
    )


@every_kind
@pytest.mark.parametrize("tail", ["rest", "renormalise"])
def test_it_is_0_where_student_and_teacher_agree_and_more_elsewhere(kind, beta, tail):
    student, teacher = top(*pair(), 3)
    close(divergence(teacher, teacher, kind, beta=beta, tail=tail), [0.0] * 6)
    assert (divergence(student, teacher, kind, beta=beta, tail=tail) > 0).all()


@every_kind
def test_the_rest_is_one_category_more(kind, beta):
    student, teacher = pair()
    merged = [torch.cat([x[:, :3], x[:, 3:].logsumexp(1, keepdim=True)], 1) for x in (student, teacher)]
    with_rest = divergence(student[:, :3], teacher[:, :3], kind, beta=beta, tail="rest")
    close(with_rest, divergence(*merged, kind, beta=beta))
    assert (with_rest <= divergence(student, teacher, kind, beta=beta) + 1e-12).all()  # merging hides differences


def test_candidates_as_they_are_are_no_divergence():
    """Negative where the student gives the candidates more than the teacher does; golden notes say so."""
    student, teacher = f64([[0.6, 0.3]]).log(), f64([[0.3, 0.2]]).log()
    assert divergence(student, teacher, "forward") < 0 < divergence(student, teacher, "forward", tail="rest")


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_lies_between_its_ends(beta):
    student, teacher = pair()
    value = divergence(student, teacher, "jsd", beta=beta)
    assert (value > 0).all() and (value < math.log(2)).all()
    for small, kind in ((1e-6, "forward"), (1 - 1e-6, "reverse")):
        near = divergence(student, teacher, "jsd", beta=small) / 1e-6
        torch.testing.assert_close(near, divergence(student, teacher, kind), rtol=1e-4, atol=0)


@every_kind
def test_what_both_think_impossible_counts_nothing(kind, beta):
    student, teacher = (x[:, :5].log_softmax(1) for x in pair())
    masked = torch.full((6, 3), -INF, dtype=torch.float64)
    wide = torch.cat([student, masked], 1).requires_grad_()
    value = divergence(wide, torch.cat([teacher, masked], 1), kind, beta=beta)
    close(value.detach(), divergence(student, teacher, kind, beta=beta))
    grad = torch.autograd.grad(value.sum(), wide)[0]
    assert grad.isfinite().all() and (grad[:, 5:] == 0).all()


def test_what_one_thinks_impossible_is_infinite_unless_it_is_bounded():
    even, certain = f64([[0.5, 0.5]]).log().requires_grad_(), f64([[0.0, -INF]])
    assert divergence(even, certain, "reverse") == INF
    close(divergence(even, certain, "forward").detach(), [math.log(2)])
    assert divergence(certain, even, "forward") == INF
    assert divergence(even, certain, "jsd").isfinite()
    bounded = divergence(even, certain, "reverse", logprob_min=-10.0)
    assert bounded.isfinite() and torch.autograd.grad(bounded.sum(), even)[0].isfinite().all()


def test_what_is_clamped_has_no_gradient():
    student, teacher = f64([[-12.0, -0.1], [-1.0, -1.0]]).requires_grad_(), f64([[-0.2, -3.0], [-1.0, -1.0]])
    low = divergence(student, teacher, "forward", logprob_min=-10.0)
    assert torch.autograd.grad(low.sum(), student)[0][0, 0] == 0
    capped = divergence(student, teacher, "forward", cap=2.0)
    close(capped.detach(), [2.0, 0.0])
    assert (torch.autograd.grad(capped.sum(), student)[0][0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_kind
def test_candidates_that_hold_all_probability_stay_finite(kind, beta, dtype):
    sure = torch.tensor([[0.0, -80.0], [1e-7, -1e3]], dtype=dtype, requires_grad=True)
    unsure = torch.tensor([[-0.7, -0.8], [-0.7, -0.8]], dtype=dtype)
    for student, teacher in ((sure, unsure), (unsure.clone().requires_grad_(), sure.detach())):
        value = divergence(student, teacher, kind, beta=beta, tail="rest")
        assert value.isfinite().all() and torch.autograd.grad(value.sum(), student)[0].isfinite().all()


@every_kind
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("width", [0, 4])
def test_no_token(kind, beta, tail, width):
    student = torch.zeros(0, width, requires_grad=True)
    value = divergence(student, torch.zeros(0, width), kind, beta=beta, tail=tail)
    assert value.shape == (0,)
    value.sum().backward()
    assert student.grad.shape == (0, width)


def test_bad_options_are_refused():
    student, teacher = pair()
    with pytest.raises(ValueError, match="unknown divergence 'backward'; choose one of reverse, forward, jsd"):
        divergence(student, teacher, "backward")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown tail 'keep'; choose one of drop, rest, renormalise"):
        divergence(student, teacher, tail="keep")  # type: ignore[arg-type]
    for beta in (0.0, 1.0, -0.5):
        with pytest.raises(ValueError, match="more than 0 and less than 1"):
            divergence(student, teacher, "jsd", beta=beta)
