"""The recipe of the pace benchmark: real rollout between an engine and a trainer that sleep.

torchrun --standalone --nproc-per-node 1 -m meshy.ignitor scripts/bench/pace/recipe.py batch_size=64
"""

from __future__ import annotations

from meshy.recipe import Recipe, Sampling, ServiceGroup
from scripts.bench.pace.roles import SeededRolloutConfig, SleepingEngineConfig, SleepingTrainerConfig

LONGEST = 16_000  # tokens; no response is cut off


def recipe(
    batch_size: int = 128,
    group_size: int = 8,
    engines: int = 1,
    slots: int = 32,
    steps: int = 5,
    step_seconds: float = 0.002,
    mean_length: float = 200.0,
    sigma: float = 1.0,
    trainer_load: float = 1.0,
    window: int | None = 1,
    max_staleness: int | None = None,
    mini_batches: int = 1,
    stream: bool = False,
    rollouts: int = 1,
    max_in_flight: int | None = None,
) -> Recipe:
    """slots: of each engine. trainer_load: how long a batch is trained, over the time in which the full engines yield
    one. rollouts: replicas. max_in_flight: see RolloutConfig.

    An engine is given a quarter more requests than it has slots, so that a slot never waits for its next request.
    """
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
                config=SleepingEngineConfig(
                    slots=slots, step_seconds=step_seconds, mean_length=mean_length, sigma=sigma
                ),
                replicas=engines,
            ),
            ServiceGroup(
                id="trainer",
                config=SleepingTrainerConfig(
                    batch_size=batch_size,
                    mini_batches=mini_batches,
                    stream_minibatch=stream,
                    max_staleness=max_staleness,
                    token_seconds=trainer_load * step_seconds / (engines * slots),
                ),
                wait_for=("inference",),
            ),
            ServiceGroup(
                id="rollout",
                config=SeededRolloutConfig(
                    group_size=group_size,
                    window=window,
                    evaluate=False,
                    log_trajectories=0.0,
                    max_in_flight=max_in_flight,
                    max_in_flight_per_engine=slots + slots // 4,
                ),
                replicas=rollouts,
                wait_for=("inference",),
            ),
        ),
    )
