"""A recipe for tests: GRPO on the demo task by what a judge says, and the functions by which it is asked."""

from __future__ import annotations

from meshy.inference.config import InferenceConfig
from meshy.recipe import Recipe, Sampling, ServiceGroup
from meshy.rewards.sample import RewardSample
from meshy.rollout.config import RolloutConfig
from meshy.scoring.judge_config import JudgeConfig
from meshy.training.config import TrainerConfig


def ask_the_same(sample: RewardSample) -> list[dict[str, str]]:
    """A judge that works the sum out by itself."""
    return [{"role": message["role"], "content": message["content"]} for message in sample.prompt]


def agrees(text: str, sample: RewardSample) -> float:
    """Whether it came to the same."""
    if "#" not in text:
        raise ValueError("it holds no result")
    return float(text.rpartition("#")[2].strip() == sample.response.rpartition("#")[2].strip())


def recipe(url: str | None = None) -> Recipe:
    """url: of a judge; None: the policy's own inference answers."""
    return Recipe(
        name="judged",
        model="recipes/demo_model",
        data="meshy.data.addition:addition",
        steps=2,
        deterministic=True,
        sampling=Sampling(max_new_tokens=60),
        context_length=128,
        groups=(
            ServiceGroup(id="inference", config=InferenceConfig(engine="embedded"), gpus_per_replica=1),
            ServiceGroup(
                id="judge",
                config=JudgeConfig(
                    url=url,
                    group=None if url else "inference",
                    prompt=ask_the_same,
                    parse=agrees,
                    max_tokens=60,
                    attempts=3,
                ),
                wait_for=("inference",),
            ),
            ServiceGroup(
                id="trainer",
                config=TrainerConfig(batch_size=32, lr=1e-4, rewards={"judge_reward": 1.0}),
                gpus_per_replica=1,
                wait_for=("inference",),
            ),
            ServiceGroup(id="rollout", config=RolloutConfig(group_size=4, evaluate=False), wait_for=("judge",)),
        ),
    )
