"""Distillation at the teacher's likeliest tokens."""

from meshy.algorithms.candidates import candidates_loss
from meshy.algorithms.interface import LossConfig, LossInputs, LossOutput


def teacher_topk_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """The divergence of the student from its teacher over the teacher's candidates, forward KL unless told otherwise.

    Candidates and the teacher's log-probs of them are the columns `ids` ("teacher_topk_ids", [tokens, K]) and `teacher`
    ("teacher_topk_logprobs"). Gradients, options and metrics are those of the loss of the student's candidates, but for
    divergence ("forward"). A form in wide use is tail "drop" with logprob_min -10 and cap 10.
    """
    return candidates_loss(
        inputs, config, "teacher_topk_loss", ids="teacher_topk_ids", teacher="teacher_topk_logprobs", kind="forward"
    )
