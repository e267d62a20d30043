"""On-policy distillation as an advantage: the reverse KL of the sampled token, teacher against student (MiniLLM, arXiv
2306.08543, and GKD, 2306.13649, minimise it over all of the vocabulary)."""

import torch

from meshy.algorithms.columns import column
from meshy.algorithms.interface import TokenAdvantages, TokenInputs, ignores_rewards, per_token


@ignores_rewards
@per_token
def opd_advantage(inputs: TokenInputs, coef: float = 1.0, teacher: str = "teacher_logprobs") -> TokenAdvantages:
    """A_t = advantages_t - coef * (log pi_S - log pi_T) of the sampled token; without a sample-level estimator, of pure
    distillation, advantages_t is 0.

    log pi_T is the column named `teacher`, log pi_S the log-prob that the token was sampled with. Each token answers
    for itself alone (a discount of 0). Tokens that no teacher scored (NaN) keep advantages_t.

    Metrics: `opd_kl`, the mean of log pi_S - log pi_T over the scored tokens of all ranks, nats; `opd_scored`, their
    share of all tokens.
    """
    said = column(inputs.columns, teacher, "opd_advantage")
    scored = ~said.isnan()
    kl = torch.where(scored, inputs.rollout_logprobs - said, 0)
    sums = torch.stack([kl.double().sum(), scored.double().sum(), torch.ones_like(kl).double().sum()])
    summed, count, tokens = inputs.total(sums.cpu()).tolist()
    advantages = inputs.advantages - coef * kl
    return TokenAdvantages(
        advantages=advantages.to(inputs.advantages.dtype),
        metrics={"opd_kl": summed / max(count, 1), "opd_scored": count / max(tokens, 1)},
    )
