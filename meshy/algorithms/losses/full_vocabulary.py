"""Distillation over the whole vocabulary (GKD, arXiv 2306.13649)."""

import torch
from torch import Tensor

from meshy.algorithms.aggregation import aggregate
from meshy.algorithms.columns import column
from meshy.algorithms.divergences import divergence, divergence_options
from meshy.algorithms.interface import LossConfig, LossInputs, LossOutput
from meshy.algorithms.logprobs import in_chunks, wide

READER = "full_vocabulary_loss"


def full_vocabulary_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """The divergence of the student from its teacher, whose log-probs of every token are the column `teacher`
    ("teacher_vocab_logprobs", [tokens, vocab]). Beside these, the logits and their gradient, nothing of that size is
    kept.

    No gradient flows through what was sampled, as in GKD: the loss says how to go on from each prefix, not which
    prefixes to come to.

    Options: divergence ("reverse", "forward" or "jsd" with `beta`, 0.5), logprob_min and cap (None): see
    algorithms.divergences. Advantages are not used.

    Tokens that no teacher scored (NaN) add nothing; the denominators remain those of all tokens. Metrics (token sums):
    `distill_kl`, the divergence, nats; `distill_scored`, tokens that were scored.
    """
    options = divergence_options(config, READER, teacher="teacher_vocab_logprobs", divergence="reverse")
    name, kind = options.pop("teacher"), options.pop("divergence")
    teacher, logits, temperature = column(inputs.columns, name, READER), inputs.logits, inputs.temperature
    if logits is None:
        raise ValueError(f"{READER} looks at the whole vocabulary: LossInputs.logits must be given")
    if len(logits) == 0:
        teacher = teacher.new_empty(logits.shape)
    if teacher.shape != logits.shape:
        raise ValueError(
            f"{READER}: the student's logits are {list(logits.shape)} and column {name!r} {list(teacher.shape)} "
            "[tokens, vocabulary]; teacher and student need one vocabulary"
        )
    scored = ~teacher[:, 0].isnan()

    def rows(logits: Tensor, teacher: Tensor, scored: Tensor) -> Tensor:
        student = (wide(logits) / temperature).log_softmax(1)
        said = torch.where(scored[:, None], teacher.to(student.dtype), student.detach())
        return torch.where(scored, divergence(student, said, kind, **options), 0)

    token_loss = in_chunks(rows, logits, teacher, scored)
    loss = aggregate(token_loss, inputs.sequence, inputs.counts, config.aggregation, config.aggregation_constant)
    metrics = {"distill_kl": token_loss.detach().sum(), "distill_scored": scored.sum()}
    return LossOutput(loss=loss, metrics=metrics)
