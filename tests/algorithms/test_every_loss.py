"""What every loss promises the trainer, whichever it is."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from meshy.algorithms import logprobs as chunking
from meshy.algorithms.aggregation import aggregate
from meshy.algorithms.interface import GlobalCounts, LossConfig
from meshy.algorithms.losses.value_loss import value_loss
from tests.algorithms.golden_cases import cases, close, counts_of, flat
from tests.algorithms.small_batch import (
    AGGREGATIONS,
    LOSSES,
    SCORED,
    Batch,
    gradient,
    metric_values,
    name_of,
    of_sequences,
)

every_loss = pytest.mark.parametrize("loss", LOSSES, ids=name_of)
partly_scored = pytest.mark.parametrize("loss", SCORED, ids=name_of)


@every_loss
@pytest.mark.parametrize("how", AGGREGATIONS)
def test_cutting_the_mini_batch_into_micro_batches_changes_nothing(loss, how, monkeypatch):
    monkeypatch.setattr(chunking, "CHUNK_ELEMENTS", 22)
    batch, config = Batch(), LossConfig(aggregation=how, aggregation_constant=7.0)
    whole, wanted = gradient(loss, batch, config)
    logits = batch.logits.clone().requires_grad_()
    inputs = batch.inputs(loss, logits)
    metrics = metric_values(loss(inputs, config).metrics)
    for cuts in ((0, 2, 5), (0, 1, 2, 3, 4, 5)):  # sequence 1 is empty: one micro-batch has no token
        parts = [loss(of_sequences(inputs, a, b), config) for a, b in pairwise(cuts)]
        total = torch.stack([part.loss for part in parts]).sum()
        close(total.detach(), whole)
        close(torch.autograd.grad(total, logits, retain_graph=True)[0], wanted)
        summed = {name: sum(float(part.metrics[name]) for part in parts) for name in metrics}
        assert summed == pytest.approx(metrics)


@every_loss
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_without_a_token_the_loss_is_zero_and_runs_backward(loss, dtype):
    batch = Batch(lengths=(), dtype=dtype)
    assert all(values.numel() == 0 and set(values.shape) == {0} for values in batch.columns_for(loss).values())
    batch.counts = GlobalCounts(tokens=10, sequences=2)
    value, grad = gradient(loss, batch)
    assert value == 0 and grad.shape == batch.logits.shape


@every_loss
def test_nobody_anywhere_has_a_token(loss):
    batch = Batch(lengths=(0, 0))
    for how in AGGREGATIONS:
        assert gradient(loss, batch, LossConfig(aggregation=how, aggregation_constant=1.0))[0] == 0


@every_loss
def test_a_single_token(loss):
    value, grad = gradient(loss, Batch(lengths=(1,)))
    assert value.isfinite() and grad.isfinite().all() and (grad != 0).any()


@every_loss
def test_logits_of_bfloat16(loss):
    batch = Batch(dtype=torch.bfloat16)
    rounded = Batch()
    rounded.__dict__.update({**batch.__dict__, "logits": batch.logits.double()})
    value, grad = gradient(loss, batch)
    wanted, exact = gradient(loss, rounded)
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(value.double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad.double(), exact, rtol=1e-2, atol=1e-3)


@every_loss
def test_metrics_have_no_graph(loss):
    batch = Batch()
    inputs = batch.inputs(loss, batch.logits.clone().requires_grad_())
    out = loss(inputs, LossConfig())
    assert out.loss.requires_grad and out.metrics
    assert not any(value.requires_grad for value in out.metrics.values())


@partly_scored
@pytest.mark.parametrize("how", AGGREGATIONS)
def test_a_row_without_a_teacher_adds_nothing_and_leaves_the_others_alone(loss, how):
    batch, config = Batch(), LossConfig(aggregation=how, aggregation_constant=7.0)
    absent = batch.sequence == 2
    changed = batch.without_a_score(loss, 2)
    value, grad = gradient(loss, batch, config, **changed)
    whole, wanted = gradient(loss, batch, config)
    assert (grad[absent] == 0).all()
    close(grad[~absent], wanted[~absent])
    alone = loss(of_sequences(batch.inputs(loss), 2, 3), config)
    close(value, whole - alone.loss)
    metrics = metric_values(loss(batch.inputs(loss), config).metrics)
    less = metric_values(loss(batch.inputs(loss, **changed), config).metrics)
    assert less == pytest.approx({name: metrics[name] - float(alone.metrics[name]) for name in metrics})


@partly_scored
def test_nobody_was_scored(loss):
    batch = Batch(lengths=(4,))
    value, grad = gradient(loss, batch, **batch.without_a_score(loss, 0))
    assert value == 0 and (grad == 0).all()


@partly_scored
def test_a_missing_column_is_named(loss):
    inputs = Batch().inputs(loss)
    columns = {name: values for name, values in inputs.columns.items() if name != SCORED[loss][0]}
    with pytest.raises(ValueError, match=f"{name_of(loss)} reads the column '{SCORED[loss][0]}'.*also_consumes"):
        loss(replace(inputs, columns=columns), LossConfig())


# The critic's ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("c", cases("value_loss"), ids=lambda c: c["name"])
def test_value_loss_golden(c):
    i = c["input"]
    sequence, values, old, returns = flat(i["mask"], i["values"], i["old_values"], i["returns"])
    token_loss, clipped = value_loss(values, old, returns, i["clip"])
    close(aggregate(token_loss, sequence, counts_of(i["mask"])), c["expect"]["loss_half_mse_token_mean"])
    close(clipped.double().mean(), c["expect"]["clipfrac"])


def test_gradient_of_the_value_loss():
    g = torch.Generator().manual_seed(1)
    values, old, returns = (torch.randn(20, generator=g, dtype=torch.float64) for _ in range(3))
    values.requires_grad_()
    for clip in (None, 0.2, 0.5):
        assert torch.autograd.gradcheck(lambda v, clip=clip: value_loss(v, old, returns, clip)[0], (values,))
    loss, clipped = value_loss(values, old, returns, 0.2)
    assert 0 < clipped.sum() < 20
    grad = torch.autograd.grad(loss.sum(), values)[0]
    close(grad, torch.where(clipped, 0, values.detach() - returns))


def test_a_value_loss_without_tokens_or_with_a_bad_clip():
    none = torch.zeros(0, requires_grad=True)
    value_loss(none, torch.zeros(0), torch.zeros(0), 0.2)[0].sum().backward()
    assert none.grad.shape == (0,)
    with pytest.raises(ValueError, match="clip must be 0 or more"):
        value_loss(none, none, none, -0.1)
