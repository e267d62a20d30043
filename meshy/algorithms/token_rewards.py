"""The reward of every token: a sample's at its last token, less a KL penalty where the recipe has one."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from meshy.algorithms.kl import kl_estimate
from meshy.algorithms.kl_reward import RewardKL


def at_last_tokens(rewards: Float[Tensor, " samples"], sequence: Int[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """Each sample's reward at its last token, 0 before. sequence: the number of each token's sample, ascending. The
    reward of a sample without a token is nowhere."""
    last = torch.ones_like(sequence, dtype=torch.bool)
    last[:-1] = sequence[1:] != sequence[:-1]
    return torch.where(last, rewards[sequence], 0)


def token_rewards(
    rewards: Float[Tensor, " tokens"],
    logprobs: Float[Tensor, " tokens"],
    ref_logprobs: Float[Tensor, " tokens"],
    *,
    coef: float,
    kind: RewardKL = "k1",
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """(R_t = r_t - coef * kl_t, kl_t), where kl_t estimates KL(policy || reference), nats; detached.

    logprobs: of the policy that sampled. Tokens that no reference scored (NaN) keep r_t, and their kl_t is NaN.
    """
    kl = kl_estimate(logprobs.detach(), ref_logprobs.detach(), kind)
    return rewards - coef * torch.where(ref_logprobs.isnan(), 0, kl), kl
