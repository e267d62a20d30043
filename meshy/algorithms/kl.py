"""Estimates of KL(p || q) from samples of p (Schulman's k1, k2, k3)."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

KLKind = Literal["k1", "k2", "k3", "low_var", "k3_k2_gradient"]

MAX_EXPONENT, MAX_LOW_VAR = 20.0, 10.0


def kl_estimate(
    logprobs: Float[Tensor, "*shape"], ref_logprobs: Float[Tensor, "*shape"], kind: KLKind = "k3"
) -> Float[Tensor, "*shape"]:
    """KL(p || ref) per token, for tokens sampled from p; nats.

    k1 = lp - ref (unbiased, can be negative); k2 = (lp - ref)^2 / 2; k3 = exp(ref - lp) - 1 - (ref - lp) (unbiased,
    never negative); low_var: k3 with its exponent clamped to +-20 and its value to +-10; k3_k2_gradient: k3 by value,
    with the gradient of k2.

    As a loss term k1 is useless: its gradient with respect to lp is 1 whatever the reference says. That of k2,
    lp - ref, is on average the gradient of KL(p || ref); that of k3, 1 - exp(ref - lp), the gradient of KL(ref || p).
    """
    difference = logprobs - ref_logprobs
    match kind:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return _k3(difference)
        case "low_var":
            return _k3(difference.clamp(-MAX_EXPONENT, MAX_EXPONENT)).clamp(-MAX_LOW_VAR, MAX_LOW_VAR)
        case "k3_k2_gradient":
            k2 = difference.square() / 2
            return k2 + (_k3(difference) - k2).detach()
    raise ValueError(f"unknown KL estimate {kind!r}; choose one of {', '.join(KLKind.__args__)}")


def _k3(difference: Tensor) -> Tensor:
    return (-difference).expm1() + difference
