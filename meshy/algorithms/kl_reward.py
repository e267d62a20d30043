"""A KL penalty inside the reward, and the controller that adapts how much of it. Torch-free."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

RewardKL = Literal["k1", "k2", "k3"]
MAX_ERROR = 0.2  # the controller's relative error is clipped to +- this


@dataclass(frozen=True, kw_only=True)
class KLInReward:
    """R_t = r_t - coef * kl_t at every token, for estimators that look at tokens (arXiv 1909.08593).

    reference: column of the reference policy's log-probs. kind: the estimate of KL(policy || reference), see
    algorithms.kl; k1 is unbiased, and here, unlike in a loss, of use. target: KL a token, in nats, to which coef adapts
    after every batch; None for a constant coef. horizon: samples over which it adapts.
    """

    reference: str = "ref_logprobs"
    coef: float
    kind: RewardKL = "k1"
    target: float | None = None
    horizon: int = 10000

    def faults(self) -> list[str]:
        """What is wrong with it, by field; each says what to change."""
        limits: tuple[tuple[bool, str, Any, str], ...] = (
            (bool(self.reference), "reference", repr(self.reference), "the name of a column, such as ref_logprobs"),
            (self.coef >= 0, "coef", self.coef, "0 or more"),
            (self.kind in get_args(RewardKL), "kind", self.kind, f"one of {', '.join(get_args(RewardKL))}"),
            (self.target is None or self.target > 0, "target", self.target, "more than 0 nats, or none"),
            (
                self.target is None or self.coef != 0,
                "coef", self.coef,
                "more than 0 with a target, for the controller multiplies it",
            ),
            (self.horizon >= 1, "horizon", self.horizon, "at least 1 sample"),
        )  # fmt: skip
        return [f"kl_in_reward.{name}: expected {what}, got {value}" for fine, name, value, what in limits if not fine]


def adapted(coef: float, kl: float, samples: int, target: float, horizon: int) -> float:
    """coef * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon): the proportional controller of arXiv
    1909.08593, after a batch of `samples` whose mean KL was `kl` (in the unit of `target`).

    Raises ValueError where one batch could take coef to 0 or below.
    """
    if MAX_ERROR * samples >= horizon:
        raise ValueError(
            f"a batch of {samples} samples could take the KL coefficient to 0 in one step with a horizon of {horizon}; "
            f"the horizon must be more than {MAX_ERROR * samples:g} samples"
        )
    error = min(max(kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return coef * (1 + error * samples / horizon)
