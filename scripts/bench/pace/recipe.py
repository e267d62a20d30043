"""The recipe of the pace benchmark: real rollout between an engine and a trainer that sleep.

torchrun --standalone --nproc-per-node 1 -m meshy.ignitor scripts/bench/pace/recipe.py --batch-size 64
"""

from __future__ import annotations

from meshy.recipe import Recipe, Sampling, ServiceGroup
from meshy.rollout.config import RolloutConfig
from scripts.bench.pace.roles import SleepingEngineConfig, SleepingTrainerConfig

SLOTS = 32
LONGEST = 16_000  # tokens; no response is cut off


def recipe(
    batch_size: int = 128,
    group_size: int = 8,
    replicas: int = 1,
    slots: int = SLOTS,
    steps: int = 5,
    step_seconds: float = 0.002,
    in_flight_per_engine: int | None = None,
) -> Recipe:
    """A batch is trained in the time in which `replicas` full engines of so many slots yield one."""
    return Recipe(
        name="pace",
        model="recipes/demo_model",
        data="scripts.bench.pace.roles:numbered",
        steps=steps,
        deterministic=True,
        sampling=Sampling(max_new_tokens=LONGEST),
        context_length=LONGEST + 100,
        groups=(
            ServiceGroup(
                id="inference",
                config=SleepingEngineConfig(slots=slots, step_seconds=step_seconds),
                replicas=replicas,
            ),
            ServiceGroup(
                id="trainer",
                config=SleepingTrainerConfig(batch_size=batch_size, token_seconds=step_seconds / (slots * replicas)),
                wait_for=("inference",),
            ),
            ServiceGroup(
                id="rollout",
                config=RolloutConfig(
                    group_size=group_size,
                    evaluate=False,
                    log_trajectories=0.0,
                    max_in_flight_per_engine=in_flight_per_engine,
                ),
                wait_for=("inference",),
            ),
        ),
    )
