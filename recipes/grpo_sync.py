"""GRPO in lock step, generation and training on GPUs (or CPU slots) of their own.

    torchrun --standalone --nproc-per-node 2 -m meshy.ignitor recipes/grpo_sync.py
    torchrun --standalone --nproc-per-node 8 -m meshy.ignitor recipes/grpo_sync.py model=Qwen/Qwen3-1.7B

Without `model` a small demo model learns addition, on any machine; with one, it learns GSM8K.
"""

from pathlib import Path

from meshy.inference.config import InferenceConfig
from meshy.recipe import Recipe, Sampling, ServiceGroup
from meshy.rollout.config import RolloutConfig
from meshy.training.config import TrainerConfig

DEMO_MODEL = str(Path(__file__).parent / "demo_model")


def recipe(model: str = DEMO_MODEL, data: str | None = None, gpus: int = 2) -> Recipe:
    """`gpus` is filled in with the size of the run: half of them generate, the other half train."""
    demo = model == DEMO_MODEL
    trainers = max(1, gpus // 2)
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
                replicas=max(1, gpus - trainers),
                gpus_per_replica=1,
            ),
            ServiceGroup(
                id="trainer",
                config=TrainerConfig(batch_size=128 if demo else 1024, lr=1e-4 if demo else 1e-6),
                gpus_per_replica=trainers,
                wait_for=("inference",),
            ),
            ServiceGroup(
                id="rollout",
                config=RolloutConfig(group_size=8, window=1),
                wait_for=("inference",),
            ),
        ),
    )
