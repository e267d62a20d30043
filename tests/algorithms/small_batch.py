"""A small micro-batch with everything in it that any loss reads, and the losses themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshy.algorithms.interface import GlobalCounts, LossConfig, LossInputs
from meshy.algorithms.logprobs import token_logprobs
from meshy.algorithms.losses.cispo import cispo_loss
from meshy.algorithms.losses.dppo import dppo_loss
from meshy.algorithms.losses.full_vocabulary import full_vocabulary_loss
from meshy.algorithms.losses.gspo import gspo_loss
from meshy.algorithms.losses.kl_loss import kl_loss
from meshy.algorithms.losses.ppo_clip import ppo_clip_loss
from meshy.algorithms.losses.sapo import sapo_loss
from meshy.algorithms.losses.student_topk import student_topk_loss
from meshy.algorithms.losses.teacher_topk import teacher_topk_loss

VOCAB, CANDIDATES, TEMPERATURE = 11, 3, 0.8
POLICY_LOSSES = [ppo_clip_loss, gspo_loss, cispo_loss, sapo_loss, dppo_loss]
DISTILLATION = [student_topk_loss, teacher_topk_loss, full_vocabulary_loss]
LOSSES = [*POLICY_LOSSES, kl_loss, *DISTILLATION]
SCORED = {  # by which column a loss tells tokens that were scored
    kl_loss: ("ref_logprobs",),
    student_topk_loss: ("teacher_topk_logprobs",),
    teacher_topk_loss: ("teacher_topk_logprobs", "teacher_topk_ids"),
    full_vocabulary_loss: ("teacher_vocab_logprobs",),
}
AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def name_of(value: Any) -> str:
    return getattr(value, "__name__", str(value))


class Batch:
    """logits: the leaf that gradients are for. targets: the sampled tokens. fixed: what else a loss is given."""

    def __init__(
        self,
        lengths: Sequence[int] = (3, 0, 5, 1, 4),
        *,
        candidates: int = CANDIDATES,
        spread: float = 0.3,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        tokens = sum(lengths)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        logits, teacher = 2 * random(tokens, VOCAB), (2 * random(tokens, VOCAB)).log_softmax(1)
        self.logits = logits.to(dtype)
        self.targets = torch.randint(0, VOCAB, (tokens,), generator=g)
        now = token_logprobs(self.logits.double(), self.targets, TEMPERATURE)[0]
        width = candidates if tokens else 0  # as columns come where there is no token
        student_ids = (logits + 0.5 * random(tokens, VOCAB)).topk(candidates).indices[:, :width].int()
        teacher_topk = teacher.topk(candidates)
        kept = torch.float64 if dtype == torch.float64 else torch.float32
        self.old = (now + spread * random(tokens)).clamp(max=0).to(kept)
        self.rollout = (now + spread * random(tokens)).clamp(max=0).to(kept)
        self.advantages = random(tokens).to(kept)
        self.sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long))
        self.counts = GlobalCounts(tokens=tokens, sequences=sum(length > 0 for length in lengths))
        self.columns: dict[str, Tensor] = {
            "ref_logprobs": (now + spread * random(tokens)).clamp(max=0).to(kept),
            "student_topk_ids": student_ids,
            "teacher_topk_logprobs": teacher.gather(1, student_ids.long()).to(kept),
            "teacher_vocab_logprobs": teacher[:, : VOCAB if tokens else 0].to(kept),
        }
        self.own: dict[str, Tensor] = {  # the columns of the teacher's own candidates
            "teacher_topk_ids": teacher_topk.indices[:, :width].int(),
            "teacher_topk_logprobs": teacher_topk.values[:, :width].to(kept),
        }

    def columns_for(self, loss: Any) -> dict[str, Tensor]:
        return {**self.columns, **(self.own if loss is teacher_topk_loss else {})}

    def inputs(self, loss: Any, logits: Tensor | None = None, **changed: Tensor) -> LossInputs:
        """changed: columns in place of the batch's."""
        logits = self.logits if logits is None else logits
        return LossInputs(
            logprobs=token_logprobs(logits, self.targets, TEMPERATURE)[0],
            old_logprobs=self.old,
            rollout_logprobs=self.rollout,
            advantages=self.advantages,
            sequence=self.sequence,
            counts=self.counts,
            columns={**self.columns_for(loss), **changed},
            logits=logits,
            temperature=TEMPERATURE,
        )

    def without_a_score(self, loss: Any, sequence: int) -> dict[str, Tensor]:
        """The columns as they are where no teacher, or reference, was to score that sequence."""
        changed = {}
        for name in SCORED[loss]:
            values = self.columns_for(loss)[name].clone()
            values[self.sequence == sequence] = -1 if name.endswith("ids") else torch.nan
            changed[name] = values
        return changed


def of_sequences(inputs: LossInputs, start: int, end: int) -> LossInputs:
    """The micro-batch of sequences [start, end); denominators stay those of the whole."""
    mine = (inputs.sequence >= start) & (inputs.sequence < end)
    assert inputs.logits is not None
    columns = {name: values[mine] for name, values in inputs.columns.items()}
    if not mine.any():
        columns = {name: values.new_zeros((0,) * values.dim()) for name, values in columns.items()}
    return replace(
        inputs,
        logprobs=inputs.logprobs[mine],
        old_logprobs=inputs.old_logprobs[mine],
        rollout_logprobs=inputs.rollout_logprobs[mine],
        advantages=inputs.advantages[mine],
        sequence=inputs.sequence[mine] - start,
        columns=columns,
        logits=inputs.logits[mine],
    )


def gradient(loss: Any, batch: Batch, config: LossConfig | None = None, **changed: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, its gradient for the logits)."""
    logits = batch.logits.clone().requires_grad_()
    value = loss(batch.inputs(loss, logits, **changed), config or LossConfig()).loss
    return value.detach(), torch.autograd.grad(value, logits)[0]


def with_options(**options: object) -> LossConfig:
    return LossConfig(options=options)


def metric_values(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
