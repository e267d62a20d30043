"""Losses of distillation: golden cases through logits, gradients, and candidates from one to the whole vocabulary."""

from dataclasses import replace

import pytest
import torch

from meshy.algorithms import logprobs as chunking
from meshy.algorithms.divergences import divergence
from meshy.algorithms.interface import GlobalCounts, LossConfig, LossInputs
from meshy.algorithms.losses.full_vocabulary import full_vocabulary_loss
from meshy.algorithms.losses.student_topk import student_topk_loss
from meshy.algorithms.losses.teacher_topk import teacher_topk_loss
from tests.algorithms.golden_cases import cases, close, f64
from tests.algorithms.small_batch import DISTILLATION, TEMPERATURE, VOCAB, Batch, gradient, name_of, with_options

CANDIDATES = [student_topk_loss, teacher_topk_loss]
KINDS = [{"divergence": "reverse"}, {"divergence": "forward"}, {"divergence": "jsd", "beta": 0.9}]
each = pytest.mark.parametrize("loss", DISTILLATION, ids=name_of)


def golden_inputs(c) -> tuple[LossInputs, torch.Tensor]:
    student, teacher = f64(c["input"]["student_logits"]), f64(c["input"]["teacher_logits"]).log_softmax(1)
    zeros = torch.zeros(len(student), dtype=torch.float64)
    inputs = LossInputs(
        logprobs=zeros,
        old_logprobs=zeros,
        rollout_logprobs=zeros,
        advantages=zeros,
        sequence=torch.arange(len(student)),
        counts=GlobalCounts(tokens=len(student), sequences=len(student)),
        logits=student,
    )
    return inputs, teacher


@pytest.mark.parametrize("c", [c for c in cases("opd") if "full_vocab" in c["name"]], ids=lambda c: c["name"])
def test_full_vocabulary_golden(c):
    kind = next(kind for kind in ("reverse", "forward", "jsd") if kind in c["name"])
    inputs, teacher = golden_inputs(c)
    config = with_options(divergence=kind, **({"beta": c["input"]["beta"]} if kind == "jsd" else {}))
    out = full_vocabulary_loss(replace(inputs, columns={"teacher_vocab_logprobs": teacher}), config)
    expected = f64(c["expect"].get("kl", c["expect"].get("jsd")))
    close(out.loss, expected.mean())
    close(out.metrics["distill_kl"], expected.sum())


@pytest.mark.parametrize("c", [c for c in cases("opd") if "teacher_top" in c["name"]], ids=lambda c: c["name"])
def test_teacher_topk_golden(c):
    inputs, teacher = golden_inputs(c)
    ids = torch.tensor(c["expect"]["ids"])
    columns = {"teacher_topk_ids": ids, "teacher_topk_logprobs": teacher.gather(1, ids)}
    config = with_options(tail="drop", logprob_min=c["input"]["logprob_min"], cap=c["input"]["cap"])
    out = teacher_topk_loss(replace(inputs, columns=columns), config)
    close(out.metrics["distill_kl"], f64(c["expect"]["kl"]).sum())
    close(out.metrics["teacher_mass"], teacher.gather(1, ids).exp().sum())
    close(out.metrics["student_mass"], inputs.logits.log_softmax(1).gather(1, ids).exp().sum())


@each
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("clamps", [{}, {"logprob_min": -2.0, "cap": 0.5}], ids=str)
def test_gradient_through_the_logits(loss, kind, clamps, monkeypatch):
    monkeypatch.setattr(chunking, "CHUNK_ELEMENTS", 8 * 3 * VOCAB)
    batch = Batch((2, 3))
    config = with_options(**kind, **clamps)
    assert torch.autograd.gradcheck(
        lambda logits: loss(batch.inputs(loss, logits), config).loss, (batch.logits.clone().requires_grad_(),)
    )


@each
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_step_down_the_gradient_brings_the_student_nearer(loss, kind):
    batch, config = Batch(), with_options(**kind)
    value, grad = gradient(loss, batch, config)
    batch.logits = batch.logits - 0.5 * grad
    assert 0 < gradient(loss, batch, config)[0] < value


@pytest.mark.parametrize("loss", CANDIDATES, ids=name_of)
@pytest.mark.parametrize("tail", ["drop", "rest", "renormalise"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_as_many_candidates_as_tokens_are_the_whole_vocabulary(loss, tail, kind):
    batch = Batch(candidates=VOCAB)
    wanted, exact = gradient(full_vocabulary_loss, batch, with_options(**kind))
    value, grad = gradient(loss, batch, with_options(**kind, tail=tail))
    close(value, wanted)
    close(grad, exact)


@pytest.mark.parametrize("loss", CANDIDATES, ids=name_of)
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("tail", ["drop", "rest"])
def test_candidates_against_plain_log_softmax(loss, k, tail):
    batch = Batch(candidates=k)
    columns = batch.columns_for(loss)
    ids = columns["student_topk_ids" if loss is student_topk_loss else "teacher_topk_ids"].long()
    logits = batch.logits.clone().requires_grad_()
    student = (logits / TEMPERATURE).log_softmax(1).gather(1, ids)
    kind = "reverse" if loss is student_topk_loss else "forward"
    expected = divergence(student, columns["teacher_topk_logprobs"], kind, tail=tail).sum() / batch.counts.tokens
    value, grad = gradient(loss, batch, with_options(tail=tail))
    close(value, expected.detach())
    close(grad, torch.autograd.grad(expected, logits)[0])


def test_one_candidate_that_is_renormalised_says_nothing():
    value, grad = gradient(student_topk_loss, Batch(candidates=1), with_options(tail="renormalise"))
    assert value == 0 and (grad == 0).all()


@each
def test_the_divergence_alone_is_learnt_from(loss):
    """No advantage and no ratio comes in: what was sampled is taken as given."""
    batch, other = Batch(), Batch()
    other.advantages, other.old, other.rollout = -3 * batch.advantages, batch.old - 1, batch.rollout - 2
    assert all(torch.equal(a, b) for a, b in zip(gradient(loss, batch), gradient(loss, other), strict=True))


@each
def test_columns_go_by_the_names_that_options_give(loss):
    batch = Batch()
    renamed = {f"my_{name}": values for name, values in batch.columns_for(loss).items()}
    inputs = replace(batch.inputs(loss), columns=renamed)
    teacher = "teacher_vocab_logprobs" if loss is full_vocabulary_loss else "teacher_topk_logprobs"
    options: dict[str, object] = {"teacher": f"my_{teacher}"}
    if loss in CANDIDATES:
        options["ids"] = "my_student_topk_ids" if loss is student_topk_loss else "my_teacher_topk_ids"
    close(loss(inputs, with_options(**options)).loss, gradient(loss, batch)[0])


@each
def test_what_cannot_be_is_refused(loss):
    batch = Batch()
    inputs = batch.inputs(loss)
    with pytest.raises(ValueError, match=r"LossInputs\.logits must be given"):
        loss(replace(inputs, logits=None), LossConfig())
    with pytest.raises(ValueError, match=r"has no option 'betta'.*beta \(default 0\.5\)"):
        loss(inputs, with_options(betta=0.1))
    with pytest.raises(ValueError, match="beta is for divergence='jsd', and this is 'forward'"):
        loss(inputs, with_options(divergence="forward", beta=0.1))
    column = "teacher_vocab_logprobs" if loss is full_vocabulary_loss else "teacher_topk_logprobs"
    narrow = {**inputs.columns, column: inputs.columns[column][:, :2]}
    with pytest.raises(ValueError, match=r"\[13, 2\]"):
        loss(replace(inputs, columns=narrow), LossConfig())
