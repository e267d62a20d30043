"""A recipe for tests: a judge between rows that somebody puts and somebody who reads its column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from meshy.columns import FINISH_REASON, LOSS_MASK, PROMPT_ID, TOKENS, TRAIN, UID, Consumes, Produces
from meshy.recipe import Recipe, ServiceConfig, ServiceGroup
from meshy.rewards.sample import RewardSample
from meshy.scoring.judge_config import JudgeConfig


@dataclass(frozen=True, kw_only=True)
class Writer(ServiceConfig):
    service: ClassVar[str] = "meshy.service:Service"

    def produces(self, recipe: Recipe) -> tuple[Produces, ...]:
        return (Produces(TRAIN, (UID, TOKENS, LOSS_MASK, PROMPT_ID, FINISH_REASON), creates=True),)


@dataclass(frozen=True, kw_only=True)
class Reader(ServiceConfig):
    service: ClassVar[str] = "meshy.service:Service"

    def consumes(self, recipe: Recipe) -> tuple[Consumes, ...]:
        return (Consumes(TRAIN, (UID, "judge_reward"), end=True),)


def shown(sample: RewardSample) -> list[dict[str, Any]]:
    """All that a judge can know of it, as the tests expect it."""
    question = sample.prompt[-1]["content"]
    return [{"role": "user", "content": f"{question} {sample.response} {sample.answer} {sample.finish_reason}"}]


def recipe(url: str, model: str = "recipes/demo_model") -> Recipe:
    judge = JudgeConfig(url=url, model="wise", prompt=shown, api_key_env="TESTS_OF_JUDGE_KEY", backoff=0.02)
    return Recipe(
        name="judged_rows",
        model=model,
        data="meshy.data.addition:addition",
        context_length=512,
        groups=(
            ServiceGroup(id="writer", config=Writer()),
            ServiceGroup(id="judge", config=judge),
            ServiceGroup(id="reader", config=Reader()),
        ),
    )
