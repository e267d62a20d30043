"""Off-policy sequence masking of DeepSeek-V3.2 (arXiv 2512.02556)."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from meshy.algorithms.sequences import sequence_mean


def opsm_keep(
    logprobs: Float[Tensor, " tokens"],
    old_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    sequence: Int[Tensor, " tokens"],
    delta: float,
) -> Bool[Tensor, " tokens"]:
    """False for tokens of negative advantage in sequences with mean(old - logprob) > delta. Detached.

    old_logprobs: of the policy that sampled, as the inference engine gave them, so that both staleness and mismatch of
    the engines count. Mistakes far off policy mislead; successes, however far, are learnt from.
    """
    divergence = sequence_mean((old_logprobs - logprobs).detach(), sequence)
    return ~((advantages < 0) & (divergence > delta)[sequence])
