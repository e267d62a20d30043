"""Distillation over some candidates of every token: what the losses of student's and of teacher's candidates share."""

import torch

from meshy.algorithms.aggregation import aggregate
from meshy.algorithms.columns import column
from meshy.algorithms.divergences import Divergence, divergence, divergence_options
from meshy.algorithms.interface import LossConfig, LossInputs, LossOutput
from meshy.algorithms.logprobs import candidate_logprobs


def candidates_loss(
    inputs: LossInputs, config: LossConfig, reader: str, *, ids: str, teacher: str, kind: Divergence
) -> LossOutput:
    """The divergence, at the candidates in column `ids`, of the student's present log-probs, which carry the gradient,
    from the teacher's in column `teacher`. ids, teacher, kind: what the options of the loss called `reader` are by
    default.
    """
    options = divergence_options(config, reader, ids=ids, teacher=teacher, divergence=kind, tail="rest")
    names = options.pop("ids"), options.pop("teacher")
    chosen, said = (column(inputs.columns, name, reader) for name in names)
    if inputs.logits is None:
        raise ValueError(f"{reader} looks at other tokens than the sampled ones: LossInputs.logits must be given")
    if chosen.shape != said.shape:
        raise ValueError(
            f"{reader}: column {names[0]!r} is {list(chosen.shape)} and column {names[1]!r} {list(said.shape)} "
            "[tokens, candidates]; let the teacher score as many candidates as there are"
        )
    scored = (chosen >= 0).all(1) & ~said.isnan().any(1)
    student = candidate_logprobs(inputs.logits, chosen.clamp(min=0), inputs.temperature)
    teacher_ = torch.where(scored[:, None], said, student.detach())
    values = divergence(student, teacher_, options.pop("divergence"), **options)
    token_loss = torch.where(scored, values, 0)
    loss = aggregate(token_loss, inputs.sequence, inputs.counts, config.aggregation, config.aggregation_constant)
    metrics = {
        "distill_kl": token_loss.detach().sum(),
        "distill_scored": scored.sum(),
        "student_mass": torch.where(scored, student.detach().exp().sum(1), 0).sum(),
        "teacher_mass": torch.where(scored, teacher_.exp().sum(1), 0).sum(),
    }
    return LossOutput(loss=loss, metrics=metrics)
