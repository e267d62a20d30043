"""Divergences of a student from its teacher at every token, over the whole vocabulary or over some candidates."""

import math
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from meshy.algorithms.interface import LossConfig
from meshy.algorithms.options import OptionError, options_of

Divergence = Literal["reverse", "forward", "jsd"]
Tail = Literal["drop", "rest", "renormalise"]


def divergence_options(config: LossConfig, reader: str, **defaults: Any) -> dict[str, Any]:
    """The options of the loss called `reader`, those of `divergence` among them. Raises OptionError."""
    options = options_of(config, reader, beta=0.5, logprob_min=None, cap=None, **defaults)
    if "beta" in config.options and options["divergence"] != "jsd":
        raise OptionError("beta", f"beta is for divergence='jsd', and this is {options['divergence']!r}; leave it out")
    return options


def divergence(
    student: Float[Tensor, "tokens candidates"],
    teacher: Float[Tensor, "tokens candidates"],
    kind: Divergence = "reverse",
    *,
    beta: float = 0.5,
    tail: Tail = "drop",
    logprob_min: float | None = None,
    cap: float | None = None,
) -> Float[Tensor, " tokens"]:
    """From log-probs S of the student and T of the teacher, nats.

    reverse: KL(S || T) = sum p_S (S - T), which seeks modes. forward: KL(T || S), which covers them. Either is infinite
    where its first gives something a probability and its second none. jsd: the generalised Jensen-Shannon divergence
    beta KL(T || M) + (1 - beta) KL(S || M), M = beta p_T + (1 - beta) p_S, 0 < beta < 1 (GKD, arXiv 2306.13649); never
    more than ln 2.

    tail: what becomes of the probability beyond the candidates. drop: nothing; the sum over candidates as they are is
    no divergence unless they are the whole vocabulary: it can be negative, and is not least at S = T. rest: what is
    left of each is one category more. renormalise: candidates are scaled to sum to 1.
    logprob_min: log-probs below are raised to it, before anything else; a student's that is raised has no gradient.
    cap: the result is clamped to +-cap; what is clamped has no gradient.
    """
    if cap is not None and not cap > 0:
        raise OptionError("cap", f"cap of a divergence must be more than 0, or none, got {cap}")
    if logprob_min is not None:
        if not logprob_min < 0:
            raise OptionError("logprob_min", f"logprob_min must be less than 0, got {logprob_min}")
        student, teacher = student.clamp(min=logprob_min), teacher.clamp(min=logprob_min)
    student, teacher = _with_tail(student, tail), _with_tail(teacher, tail)
    match kind:
        case "reverse":
            value = _kl(student, teacher)
        case "forward":
            value = _kl(teacher, student)
        case "jsd":
            value = _jsd(student, teacher, beta)
        case _:
            known = ", ".join(get_args(Divergence))
            raise OptionError("divergence", f"unknown divergence {kind!r}; choose one of {known}")
    return value if cap is None else value.clamp(-cap, cap)


def _with_tail(logprobs: Tensor, tail: Tail) -> Tensor:
    match tail:
        case "drop":
            return logprobs
        case "rest":
            # Candidates that hold all probability may sum to a little more than 1.
            left = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(logprobs.dtype).eps)
            return torch.cat([logprobs, left.log()], -1)
        case "renormalise":
            return logprobs.log_softmax(-1)
    raise OptionError("tail", f"unknown tail {tail!r}; choose one of {', '.join(Tail.__args__)}")


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """sum exp(p) (p - q), where what has probability 0 in p counts 0."""
    probability = p.exp()
    return (probability * torch.where(probability > 0, p - q, 0)).sum(-1)


def _jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    if not 0 < beta < 1:
        why = f"beta of jsd must be more than 0 and less than 1, got {beta}; in place of 0 take forward, of 1 reverse"
        raise OptionError("beta", why)
    possible = (student > -math.inf) | (teacher > -math.inf)  # logaddexp of two -inf has a gradient of NaN
    mixture = torch.logaddexp(
        torch.where(possible, teacher + math.log(beta), 0), torch.where(possible, student + math.log1p(-beta), 0)
    )
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)
