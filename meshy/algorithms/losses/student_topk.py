"""Distillation at the student's likeliest tokens, as the teacher scores them."""

from meshy.algorithms.candidates import candidates_loss
from meshy.algorithms.interface import LossConfig, LossInputs, LossOutput


def student_topk_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """The divergence of the student from its teacher over the student's candidates, on sequences that it wrote itself.

    Candidates are those of sampling time (column option `ids`: "student_topk_ids", [tokens, K]), with the teacher's
    log-probs of them (`teacher`: "teacher_topk_logprobs"); the student's own are taken anew from the logits, with
    gradient. No gradient flows through what was sampled, as in GKD (arXiv 2306.13649): the loss says how to go on
    from each prefix, not which prefixes to come to.

    Options: divergence ("reverse", "forward" or "jsd" with `beta`, 0.5), tail ("rest", "drop" or "renormalise"),
    logprob_min and cap (None): see algorithms.divergences. Advantages are not used.

    Tokens that no teacher scored (NaN, or an id of -1) add nothing; the denominators remain those of all tokens.
    Metrics (token sums): `distill_kl`, the divergence, nats; `distill_scored`, tokens that were scored; `student_mass`
    and `teacher_mass`, the probability that each gives to the candidates.
    """
    return candidates_loss(
        inputs, config, "student_topk_loss", ids="student_topk_ids", teacher="teacher_topk_logprobs", kind="reverse"
    )
