"""What an advantage estimator and a policy loss are given, and what they return.

Per-token tensors are flat: one entry per token that the policy wrote, of all sequences of a micro-batch one after
another, in row order. Prompts, padding and masked tokens are not there, so nothing can leak from them. `sequence`
says to which sequence an entry belongs.

An estimator is any function `(AdvantageInputs, **options) -> AdvantageOutput`, of whole samples, or
`(TokenInputs, **options) -> TokenAdvantages`, of their tokens; a loss, or a term that is added to it, is any function
`(LossInputs, LossConfig) -> LossOutput`. A recipe names them by import path.

Columns that roles of a recipe write hold NaN (ids: -1) at tokens of rows that no such role was to score (see
`Produces.route`); what reads them leaves such tokens out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from jaxtyping import Float, Int
from torch import Tensor

LossFunction = TypeVar("LossFunction", bound=Callable[..., Any])
Estimator = TypeVar("Estimator", bound=Callable[..., Any])
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """One optimiser batch, whole groups only.

    rewards: raw score of each sample, any float dtype.
    groups: group number of each sample; samples with one number answer one prompt.
    names: what to call each sample in an error (its uid); empty to call it by its row number.
    columns: further numbers of each sample that the recipe asked for, by name.
    """

    rewards: Float[Tensor, " samples"]
    groups: Int[Tensor, " samples"]
    names: tuple[str, ...] = ()
    columns: Mapping[str, Float[Tensor, " samples"]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AdvantageOutput:
    """advantages: one value per sample, copied to each of its response tokens. metrics: plain numbers for the log."""

    advantages: Float[Tensor, " samples"]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TokenInputs:
    """The samples of one optimiser batch that one rank has.

    rewards: of each token: the sample's reward at its last token, 0 before; less the KL penalty of each token where the
    recipe puts that into the reward. advantages: of the sample-level estimator, copied to each token; 0 where the
    recipe names none. rollout_logprobs: what the inference engine gave at sampling time. sequence: index (0..n-1,
    ascending) of the token's sample on this rank. columns: further per-token columns that the recipe asked for.
    total: the sum over all ranks of a small CPU tensor of one shape and dtype everywhere; every rank must call it
    equally often.
    """

    rewards: Float[Tensor, " tokens"]
    advantages: Float[Tensor, " tokens"]
    rollout_logprobs: Float[Tensor, " tokens"]
    sequence: Int[Tensor, " tokens"]
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    total: Callable[[Tensor], Tensor] = lambda values: values


@dataclass(frozen=True, kw_only=True)
class TokenAdvantages:
    """advantages: of each token. returns: what a critic should have said at each token, where the estimator knows.
    metrics: numbers for the log, the same on every rank."""

    advantages: Float[Tensor, " tokens"]
    returns: Float[Tensor, " tokens"] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GlobalCounts:
    """Denominators of the whole optimiser mini-batch, over all micro-batches and all ranks.

    tokens: response tokens. sequences: sequences with at least one response token.
    """

    tokens: int
    sequences: int


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Settings of a policy loss: clip range (1 - clip_low, 1 + clip_high), dual clip bound (> 1, or None), how token
    losses become one number, the constant of `seq-mean-token-sum-norm`, and `options` that only some losses know."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    aggregation: Aggregation = "token-mean"
    aggregation_constant: float | None = None
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """One micro-batch.

    logprobs: log softmax(logits / temperature) of each token under the weights being trained; carries the gradient.
    old_logprobs: the same under the policy whose ratio is clipped; no gradient.
    rollout_logprobs: what the inference engine gave at sampling time.
    advantages: of each token, already multiplied by its off-policy factor (see algorithms.correction), if any. A loss
    must be positively homogeneous in them, so that this weights its token loss.
    sequence: index (0..n-1, ascending) of the token's sequence within the micro-batch.
    counts: global denominators: the sum of the losses of all micro-batches of all ranks is the loss of the mini-batch.
    columns: further per-token columns, [tokens] or [tokens, K], that the recipe asked for, by name.
    logits, temperature: what logprobs are taken from, for losses that look at other tokens than the sampled ones (see
    algorithms.logprobs).
    """

    logprobs: Float[Tensor, " tokens"]
    old_logprobs: Float[Tensor, " tokens"]
    rollout_logprobs: Float[Tensor, " tokens"]
    advantages: Float[Tensor, " tokens"]
    sequence: Int[Tensor, " tokens"]
    counts: GlobalCounts
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    logits: Float[Tensor, "tokens vocab"] | None = None
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """loss: this micro-batch's share of the global loss; keeps its graph even where no token is left, so that every
    rank runs backward. metrics: sums over this micro-batch's tokens, detached; the trainer adds them up over
    micro-batches and ranks and divides by `counts.tokens`."""

    loss: Float[Tensor, ""]
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


def per_token(estimator: Estimator) -> Estimator:
    """Says of an estimator that it is given the tokens of samples (`TokenInputs`), after the sample-level one, if any.

    The trainer runs it on every rank, on the samples that the rank has.
    """
    estimator.per_token = True  # type: ignore[attr-defined]
    return estimator


def ignores_rewards(estimator: Estimator) -> Estimator:
    """Says of an estimator of tokens that it reads no rewards, so that a KL penalty within them would be of no effect;
    a recipe that sets one is refused."""
    estimator.ignores_rewards = True  # type: ignore[attr-defined]
    return estimator


def vanishes_at_zero_advantage(loss: LossFunction) -> LossFunction:
    """Says of a loss that a token of advantage 0 adds exactly nothing to it or to its gradient, whatever else is given.

    The trainer then runs no backward for samples whose advantage is 0, often most of a batch: same gradient, less time.
    """
    loss.vanishes_at_zero_advantage = True  # type: ignore[attr-defined]
    return loss
