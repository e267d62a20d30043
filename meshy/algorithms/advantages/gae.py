"""Generalised advantage estimation (GAE, arXiv 1506.02438) from a critic's values."""

import torch

from meshy.algorithms.columns import column
from meshy.algorithms.interface import TokenAdvantages, TokenInputs, per_token
from meshy.algorithms.returns import discounted_sum, following
from meshy.algorithms.whiten import whiten as whitened


@per_token
def gae_advantage(
    inputs: TokenInputs, gamma: float = 1.0, lam: float = 1.0, values: str = "values", whiten: bool = True
) -> TokenAdvantages:
    """d_t = R_t + gamma V_{t+1} - V_t and A_t = d_t + gamma lam A_{t+1}; `returns` are A_t + V_t, before A is whitened.

    V is the column named `values`, and t + 1 the next token that the policy wrote: what a tool or a user said between
    is passed over. V beyond the last token is 0, also where a response was cut off by its length. gamma, lam: 0 to 1.
    whiten: over the tokens of all ranks; 0 where those are fewer than two. `advantages` of a sample-level estimator are
    ignored.

    Tokens that no critic scored (V is NaN) have advantage 0, returns NaN, and no part in the whitening.
    """
    dtype = inputs.rewards.dtype
    v = column(inputs.columns, values, "gae_advantage").double()
    scored = ~v.isnan()
    v, sequence = v[scored], inputs.sequence[scored]
    delta = inputs.rewards[scored].double() + gamma * following(v, sequence) - v
    raw = discounted_sum(delta, sequence, gamma * lam)
    returns = torch.full_like(inputs.rewards, torch.nan)
    returns[scored] = (raw + v).to(dtype)
    advantages = torch.zeros_like(inputs.rewards)
    advantages[scored] = (whitened(raw, inputs.total) if whiten else raw).to(dtype)
    return TokenAdvantages(advantages=advantages, returns=returns)
