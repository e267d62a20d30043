"""GRPO in lock step, generation and training in turn on the same GPUs (or CPU slots).

    torchrun --standalone --nproc-per-node 1 -m meshy.ignitor recipes/grpo_colocated.py
    torchrun --standalone --nproc-per-node 8 -m meshy.ignitor recipes/grpo_colocated.py model=Qwen/Qwen3-1.7B

The same as grpo_sync.py but for `colocate_with` and the ring: inference holds the GPUs while nobody asks, and the
trainer asks for them when it has a batch.
"""

from pathlib import Path

from meshy.inference.config import InferenceConfig
from meshy.recipe import FALLBACK, ON_DEMAND, ColocationRing, Recipe, Sampling, ServiceGroup
from meshy.rollout.config import RolloutConfig
from meshy.training.config import TrainerConfig

DEMO_MODEL = str(Path(__file__).parent / "demo_model")


def recipe(model: str = DEMO_MODEL, data: str | None = None, gpus: int = 1) -> Recipe:
    """`gpus` is filled in with the size of the run: each has an engine of its own, and the trainer spans all."""
    demo = model == DEMO_MODEL
    return Recipe(
        model=model,
        data=data or ("meshy.data.addition:addition" if demo else "meshy.data.gsm8k:gsm8k"),
        steps=60 if demo else 200,
        deterministic=demo,
        sampling=Sampling(temperature=1.0, max_new_tokens=80 if demo else 1024),
        context_length=128 if demo else 2048,
        groups=(
            ServiceGroup(
                id="inference",
                config=InferenceConfig(),
                replicas=gpus,
                gpus_per_replica=1,
            ),
            ServiceGroup(
                id="trainer",
                config=TrainerConfig(batch_size=128 if demo else 1024, lr=1e-4 if demo else 1e-6),
                gpus_per_replica=gpus,
                colocate_with="inference",
                wait_for=("inference",),
            ),
            ServiceGroup(
                id="rollout",
                config=RolloutConfig(group_size=8, window=1),
                wait_for=("inference",),
            ),
        ),
        rings=(ColocationRing(id="gpus", members=(("inference", FALLBACK), ("trainer", ON_DEMAND))),),
    )
