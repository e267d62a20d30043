"""REINFORCE++ with a baseline (arXiv 2501.03262): the group's mean is taken off, then the batch is whitened."""

from meshy.algorithms.interface import TokenAdvantages, TokenInputs, ignores_rewards, per_token
from meshy.algorithms.whiten import whiten


@ignores_rewards
@per_token
def reinforce_pp_baseline_advantage(inputs: TokenInputs) -> TokenAdvantages:
    """The sample-level advantages, copied to their tokens and whitened over the tokens of all ranks; 0 where those are
    fewer than two.

    The means need whole groups, which only a sample-level estimator is given: put dr_grpo (r_i - mean_g) before this
    one. A group of one has 0 from it, and is whitened with the others.
    """
    return TokenAdvantages(advantages=whiten(inputs.advantages, inputs.total))
