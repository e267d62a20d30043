"""A recipe for tests: the demo in lock step, judged by the policy itself. It answers each question once more, greedily,
and a response is good if it comes to the same sum."""

from __future__ import annotations

import re
from typing import Any

from meshy.inference.config import InferenceConfig
from meshy.recipe import Recipe, Sampling, ServiceGroup
from meshy.rewards.sample import RewardSample
from meshy.rollout.config import RolloutConfig
from meshy.scoring.judge_config import JudgeConfig
from meshy.training.config import TrainerConfig


def question(sample: RewardSample) -> list[dict[str, Any]]:
    return [dict(message) for message in sample.prompt]


def same_sum(text: str, sample: RewardSample) -> bool:
    """Whether both come to one number. ValueError where the judge comes to none."""
    judged, said = (re.findall(r"#(\d+)", answer) for answer in (text, sample.response))
    if not judged:
        raise ValueError("it comes to no sum")
    return judged[-1:] == said[-1:]


def recipe(model: str = "recipes/demo_model") -> Recipe:
    judge = JudgeConfig(
        group="inference", prompt=question, parse=same_sum, max_tokens=60, attempts=2, backoff=0.1, fallback=0.0
    )
    return Recipe(
        name="judged",
        model=model,
        data="meshy.data.addition:addition",
        data_options={"max_digits": 3},
        steps=2,
        deterministic=True,
        sampling=Sampling(max_new_tokens=60),
        context_length=128,
        groups=(
            ServiceGroup(id="inference", config=InferenceConfig(engine="embedded"), gpus_per_replica=1),
            ServiceGroup(id="judge", config=judge, wait_for=("inference",)),
            ServiceGroup(
                id="trainer",
                config=TrainerConfig(batch_size=64, lr=1e-4, rewards={"judge_reward": 1.0}),
                gpus_per_replica=1,
                wait_for=("inference",),
            ),
            ServiceGroup(
                id="rollout", config=RolloutConfig(group_size=8, evaluate=False), wait_for=("inference", "judge")
            ),
        ),
    )
