"""A recipe for tests: the demo in lock step, learning from what a reward model says instead of the task's reward."""

from meshy.inference.config import InferenceConfig
from meshy.recipe import FALLBACK, ON_DEMAND, ColocationRing, Recipe, Sampling, ServiceGroup
from meshy.rollout.config import RolloutConfig
from meshy.scoring.reward_model_config import RewardModelConfig
from meshy.training.config import TrainerConfig


def recipe(reward_model: str, model: str = "recipes/demo_model", replicas: int = 1, colocated: bool = False) -> Recipe:
    """replicas: of the reward model. colocated: all take turns on one GPU (or CPU slot)."""
    shared = "inference" if colocated else None
    members = (("inference", FALLBACK), ("reward_model", ON_DEMAND), ("trainer", ON_DEMAND))
    return Recipe(
        name="rewarded",
        model=model,
        data="meshy.data.addition:addition",
        steps=2,
        deterministic=True,
        sampling=Sampling(max_new_tokens=60),
        context_length=128,
        groups=(
            ServiceGroup(id="inference", config=InferenceConfig(engine="embedded"), gpus_per_replica=1),
            ServiceGroup(
                id="reward_model",
                config=RewardModelConfig(model=reward_model),
                replicas=replicas,
                gpus_per_replica=1,
                colocate_with=shared,
                wait_for=("inference",),
            ),
            ServiceGroup(
                id="trainer",
                config=TrainerConfig(batch_size=32, lr=1e-4, rewards={"model_reward": 1.0}),
                gpus_per_replica=1,
                colocate_with=shared,
                wait_for=("inference",),
            ),
            ServiceGroup(id="rollout", config=RolloutConfig(group_size=4, evaluate=False), wait_for=("reward_model",)),
        ),
        rings=(ColocationRing(id="gpus", members=members),) if colocated else (),  # type: ignore[arg-type]
    )
