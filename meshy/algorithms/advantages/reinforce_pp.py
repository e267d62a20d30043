"""REINFORCE++ (arXiv 2501.03262): discounted returns, whitened over the batch; neither groups nor a critic."""

from meshy.algorithms.interface import TokenAdvantages, TokenInputs, per_token
from meshy.algorithms.returns import discounted_sum
from meshy.algorithms.whiten import whiten


@per_token
def reinforce_pp_advantage(inputs: TokenInputs, gamma: float = 1.0) -> TokenAdvantages:
    """G_t = R_t + gamma G_{t+1}, whitened over the tokens of all ranks; 0 where those are fewer than two. `returns` are
    the G_t. `advantages` of a sample-level estimator are ignored.

    gamma: 0 to 1. A KL penalty belongs to the paper's rewards: see algorithms.kl_reward.
    """
    returns = discounted_sum(inputs.rewards, inputs.sequence, gamma)
    dtype = inputs.rewards.dtype
    return TokenAdvantages(advantages=whiten(returns, inputs.total).to(dtype), returns=returns.to(dtype))
