"""The configuration of a reward model. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from meshy.columns import LOSS_MASK, N_TOKENS, TOKENS, TRAIN, Column, Consumes, Produces
from meshy.recipe import Limit, Recipe, out_of_range
from meshy.scoring.config import ModelOptions


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(ModelOptions):
    """Says of each response how good it is, in one number that a trained model gives (arXiv 2203.02155).

    It reads prompt and response as the policy's tokens and writes `column`, one number a row. The trainer learns from
    it once its `rewards` name the column: {"model_reward": 1.0} for it alone, {"reward": 1.0, "model_reward": 0.5} for
    both. Evaluations and trajectories show the task's own reward all the same.

    model: a sequence classifier of one label, in Hugging Face format, with the policy's own tokenizer. Its number is
        read at the row's last token, as transformers reads it: the last one that is not the padding of its config.json.
    clip: the number is cut off at plus and minus this, for a model's own scores have no bounds; None: as it is.
    route: only rows that have the column `route.<route>` (see `routes` of rollout). None: all.
    """

    service: ClassVar[str] = "meshy.scoring.reward_model:RewardModelService"

    model: str
    column: str = "model_reward"
    clip: float | None = None
    route: str | None = None

    def consumes(self, recipe: Recipe) -> tuple[Consumes, ...]:
        return (Consumes(TRAIN, (TOKENS, LOSS_MASK, N_TOKENS), route=self.route),)

    def produces(self, recipe: Recipe) -> tuple[Produces, ...]:
        column = Column(self.column, "float32", doc="how good a reward model finds the response")
        return (Produces(TRAIN, (column,), route=self.route),)

    def faults(self, recipe: Recipe) -> list[str]:
        limits: tuple[Limit, ...] = (
            (self.column.isidentifier(), "column", repr(self.column), "a name such as 'model_reward'"),
            (self.clip is None or self.clip > 0, "clip", self.clip, "more than 0, or none"),
        )
        faults = out_of_range(limits)
        return faults + super().faults(recipe)

    def preflight(self, recipe: Recipe) -> list[str]:
        from meshy.scoring.preflight import reward_model_faults

        return reward_model_faults(self, recipe)
