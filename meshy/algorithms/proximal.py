"""The proximal policy of decoupled PPO (arXiv 2110.00641), between the one that sampled and the one being trained.

The ratio that is clipped is pi / pi_prox, and the importance weight pi_prox / pi_behaviour corrects for sampling.
"""

from jaxtyping import Float, Int
from torch import Tensor


def proximal_share(ages: Int[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """alpha = (v_prox - v_behaviour) / (v_theta - v_behaviour) = age / (age + 1) (arXiv 2505.24298).

    ages: v_prox - v_behaviour, where v_prox is the weight version that training started from; v_theta, the one being
    made, is the next. 0 for tokens on policy.
    """
    ages = ages.clamp(min=0).float()
    return ages / (ages + 1)


def loglinear_proximal(
    rollout_logprobs: Float[Tensor, " tokens"],
    logprobs: Float[Tensor, " tokens"],
    share: Float[Tensor, " tokens"],
) -> Float[Tensor, " tokens"]:
    """rollout + share * (current - rollout), detached: the proximal log-probs without another forward pass."""
    return rollout_logprobs + share * (logprobs.detach() - rollout_logprobs)
