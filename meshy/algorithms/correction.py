"""How a recipe corrects for tokens that another policy, or another program, sampled. Torch-free.

The correction becomes one factor a token, weight times keep, which multiplies the advantage before the policy loss. A
policy loss is positively homogeneous in the advantage, so this is the same as weighting its token loss; denominators
stay those of all tokens, or rejection would inflate the gradients of what is left.
"""

from dataclasses import dataclass
from typing import Any, Literal

OldLogprobs = Literal["rollout", "recompute", "loglinear"]
Level = Literal["token", "sequence", "geometric"]
Action = Literal["truncate", "mask"]
Statistic = Literal[
    "token_k1", "token_k2", "token_k3", "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_max_k2", "seq_max_k3",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Off-policy correction; nothing by default. Ratios are of old_logprobs against the inference engine's, or, where
    old_logprobs are the engine's own ("rollout"), of the policy being trained against them.

    importance: weights pi_old / pi_rollout of each token, of its whole sequence, or the geometric mean of the sequence.
    action: what happens outside [low, high]: the weight is moved to the bound ("truncate"; TIS), or made 0 ("mask";
    IcePop, and the cap of decoupled PPO). low, high: None for no bound.
    veto: a sequence with any token ratio below this is dropped (1e-4 is usual).
    reject: tokens, or whole sequences, whose statistic of d = log(pi_old / pi_rollout) leaves [reject_low, reject_high]
    are dropped: k1 = d, k2 = d^2 / 2, k3 = exp(d) - 1 - d, in nats.
    opsm: sequences of negative advantage are dropped where mean log(pi_rollout / pi), pi being trained, exceeds this
    (1e-4, say).
    """

    importance: Level | None = None
    action: Action = "truncate"
    low: float | None = None
    high: float | None = 2.0
    veto: float | None = None
    reject: Statistic | None = None
    reject_low: float | None = None
    reject_high: float | None = None
    opsm: float | None = None

    @property
    def active(self) -> bool:
        return self != Correction()

    def faults(self, old_logprobs: OldLogprobs) -> list[str]:
        """What is wrong with it, by field; each says what to change."""
        plain = Correction()
        untouched = (self.action, self.low, self.high) == (plain.action, plain.low, plain.high)
        one_sided = self.reject is not None and not self.reject.endswith("k1")
        limits: tuple[tuple[bool, str, Any, str], ...] = (
            (
                self.importance is not None or untouched,
                "importance", "none",
                "token, sequence or geometric, since action, low or high is set",
            ),
            (self.low is None or 0 <= self.low <= 1, "low", self.low, "0 to 1 (the ratio on policy), or none"),
            (self.high is None or self.high >= 1, "high", self.high, "at least 1 (the ratio on policy), or none"),
            (
                self.action != "mask" or self.low is not None or self.high is not None,
                "action", "mask without low and high",
                "a bound outside which weights become 0",
            ),
            (self.veto is None or 0 < self.veto < 1, "veto", self.veto, "more than 0 and less than 1, or none"),
            (
                self.reject is not None or (self.reject_low is None and self.reject_high is None),
                "reject", "none",
                "a statistic such as seq_mean_k3, since reject_low or reject_high is set",
            ),
            (
                self.reject is None or self.reject_low is not None or self.reject_high is not None,
                "reject", f"{self.reject} without reject_low and reject_high",
                "a bound outside which to reject",
            ),
            (
                self.reject_low is None or self.reject_low <= 0,
                "reject_low", self.reject_low,
                "0 or less (the statistic on policy is 0), or none",
            ),
            (
                self.reject_low is None or not one_sided,
                "reject_low", self.reject_low,
                f"none for {self.reject}, which is never negative",
            ),
            (
                self.reject_high is None or self.reject_high >= 0,
                "reject_high", self.reject_high,
                "0 or more (the statistic on policy is 0), or none",
            ),
            (self.opsm is None or self.opsm >= 0, "opsm", self.opsm, "0 or more, or none"),
            (
                self.importance is None or old_logprobs != "rollout",
                "importance", self.importance,
                "none with old_logprobs=rollout, whose clipped ratio is taken against the inference engine's log-probs "
                "and so corrects already (or set old_logprobs to recompute or loglinear)",
            ),
        )  # fmt: skip
        return [f"correction.{name}: expected {what}, got {value}" for fine, name, value, what in limits if not fine]
