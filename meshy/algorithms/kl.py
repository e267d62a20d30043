"""Estimates of KL(p || q) from samples of p (Schulman's k1, k2, k3)."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

KLKind = Literal["k1", "k2", "k3"]


def kl_estimate(
    logprobs: Float[Tensor, "*shape"], ref_logprobs: Float[Tensor, "*shape"], kind: KLKind = "k3"
) -> Float[Tensor, "*shape"]:
    """KL(p || ref) per token, for tokens sampled from p; nats.

    k1 = lp - ref (unbiased, can be negative); k2 = (lp - ref)^2 / 2; k3 = exp(ref - lp) - 1 - (ref - lp) (unbiased,
    never negative). As a loss term k1 is useless: its gradient with respect to lp is 1 whatever the reference says.
    """
    difference = logprobs - ref_logprobs
    match kind:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return (-difference).expm1() + difference
    raise ValueError(f"unknown KL estimate {kind!r}; choose k1, k2 or k3")
