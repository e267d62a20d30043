"""The configuration of a critic. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from meshy.columns import (
    BATCH,
    LOSS_MASK,
    N_TOKENS,
    N_WRITTEN,
    POSITION,
    ROLLOUT_LOGPROBS,
    TOKENS,
    TRAIN,
    Column,
    Consumes,
    PartitionContract,
    Produces,
)
from meshy.engine_options import OptimizerOptions
from meshy.recipe import Limit, Recipe, out_of_range
from meshy.scoring.config import ModelOptions

ALWAYS = ("tokens", "loss_mask", "rollout_logprobs")


@dataclass(frozen=True, kw_only=True)
class CriticConfig(ModelOptions, OptimizerOptions):
    """Says of each token what reward is still to come (PPO, arXiv 1707.06347), and learns to say it better.

    It writes `column` [L]: the value of the state in which each token was written. When a whole batch has its values,
    it learns from that batch what the trainer's own `token_advantage` gives as returns, from the same rewards; so
    gamma, lambda, the KL penalty and the like stand once, in the trainer's options. While it has not learnt anything
    yet the policy may be left as it is: `frozen_batches` of the trainer.

    model: a language model, whose last layer is replaced by one of zeros, or a sequence classifier of one label.
    clip: how far a value may move from the one that was written before the loss stops to reward it; None: any.
    epochs, mini_batches: of a batch. lr, betas and the like: of its own optimiser, see `OptimizerOptions`.
    also_consumes: more columns that the trainer's token_advantage reads.
    """

    service: ClassVar[str] = "meshy.scoring.critic:CriticService"
    can_restart: ClassVar[bool] = False

    max_restarts: int = 0
    column: str = "values"
    also_consumes: tuple[str, ...] = ()
    clip: float | None = 0.2
    epochs: int = 1
    mini_batches: int = 1
    lr: float = 1e-5

    def trainer(self, recipe: Recipe) -> Any:
        """The configuration of whoever trains the policy; None where nobody does."""
        return next((group.config for group in recipe.groups if group.config.ends_run), None)

    def reward_columns(self, recipe: Recipe) -> tuple[str, ...]:
        """Numbers of a sample, by which the trainer rewards it."""
        return tuple(getattr(self.trainer(recipe), "rewards", ()))

    def token_columns(self, recipe: Recipe) -> tuple[str, ...]:
        """Per-token columns that values or returns take."""
        kl = getattr(self.trainer(recipe), "kl_in_reward", None)
        return tuple(dict.fromkeys((*ALWAYS, *([kl.reference] if kl else []), *self.also_consumes)))

    def of_tokens(self, recipe: Recipe, contract: PartitionContract) -> dict[str, Column]:
        """What the trainer's token_advantage may read here."""
        names = (*self.token_columns(recipe), self.column)
        return {name: contract.columns[name] for name in names if name not in (TOKENS.name, LOSS_MASK.name)}

    def consumes(self, recipe: Recipe) -> tuple[Consumes, ...]:
        own = (TOKENS, LOSS_MASK, ROLLOUT_LOGPROBS, N_TOKENS, N_WRITTEN, POSITION, BATCH)
        more = [*self.token_columns(recipe), *self.reward_columns(recipe)]
        names = {column.name for column in own}
        return (Consumes(TRAIN, (*own, *dict.fromkeys(name for name in more if name not in names))),)

    def produces(self, recipe: Recipe) -> tuple[Produces, ...]:
        return (Produces(TRAIN, (Column(self.column, "float32", "jagged", "reward still to come"),)),)

    def faults(self, recipe: Recipe) -> list[str]:
        limits: tuple[Limit, ...] = (
            (self.column.isidentifier(), "column", repr(self.column), "a name such as 'values'"),
            (self.clip is None or self.clip > 0, "clip", self.clip, "more than 0, or none"),
            (self.epochs >= 1, "epochs", self.epochs, "at least 1"),
            (self.mini_batches >= 1, "mini_batches", self.mini_batches, "at least 1"),
            (
                self.trainer(recipe) is None or self.mini_batches <= max(recipe.batch_size, 1),
                "mini_batches", self.mini_batches, "at most the trainer's batch_size",
            ),
        )  # fmt: skip
        faults = out_of_range(limits)
        faults += self._kl_faults(recipe)
        replicas = [group.replicas for group in recipe.groups if group.config is self]
        if replicas and replicas[0] != 1:
            faults.append(f"replicas: expected 1 critic, got {replicas[0]}; give it more GPUs with gpus_per_replica")
        if self.trainer(recipe) is not None and getattr(self.trainer(recipe), "token_advantage", None) is None:
            faults.append(
                "a critic learns the returns of the trainer's token_advantage, and there is none; set that to "
                "'meshy.algorithms.advantages.gae:gae_advantage'"
            )
        return faults + super().faults(recipe)

    def _kl_faults(self, recipe: Recipe) -> list[str]:
        """An adaptive coefficient is the same for trainer and critic only if both see the same batches."""
        trainer = self.trainer(recipe)
        kl = getattr(trainer, "kl_in_reward", None)
        if kl is None or kl.target is None:
            return []
        apart = {
            "stream_minibatch": trainer.stream_minibatch,
            "max_staleness": trainer.max_staleness is not None,
            "a window of none": any(getattr(group.config, "window", 1) is None for group in recipe.groups),
        }
        return [
            f"the trainer's kl_in_reward.target adapts the coefficient from batch to batch, and with {name} a critic's "
            "batches are others than the trainer's; set target to none, or go without the critic"
            for name, given in apart.items()
            if given
        ]

    def preflight(self, recipe: Recipe) -> list[str]:
        from meshy.scoring.preflight import critic_faults

        return critic_faults(self, recipe)
