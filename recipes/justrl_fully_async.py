"""JustRL (arXiv 2512.16649), fully asynchronous: 8 GPUs generate without a pause, 8 train whatever is complete.

    torchrun --nnodes 2 --nproc-per-node 8 ... -m meshy.ignitor recipes/justrl_fully_async.py
    torchrun --standalone --nproc-per-node 2 -m meshy.ignitor recipes/justrl_fully_async.py \
        model=recipes/demo_model data=meshy.data.addition:addition

As justrl.py but for the placement, `window`, and the trainer's `stream_minibatch` and `max_staleness`.
"""

from pathlib import Path

from meshy.inference.config import InferenceConfig
from meshy.recipe import Recipe, Sampling, ServiceGroup
from meshy.rollout.config import RolloutConfig
from meshy.training.config import TrainerConfig

MODEL = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
DATA = "meshy.data.dapo_math:dapo_math"


def recipe(model: str = MODEL, data: str = DATA, gpus: int = 16) -> Recipe:
    """`gpus` is filled in with the size of the run: half of them generate, the other half train."""
    demo = Path(model).name == "demo_model"
    trainers = max(1, gpus // 2)
    return Recipe(
        model=model,
        data=data,
        steps=60 if demo else 4000,
        sampling=Sampling(temperature=1.0, max_new_tokens=80 if demo else 15_360),
        context_length=128 if demo else 16_384,
        groups=(
            ServiceGroup(
                id="inference",
                config=InferenceConfig(),
                replicas=max(1, gpus - trainers),
                gpus_per_replica=1,
            ),
            ServiceGroup(
                id="trainer",
                config=TrainerConfig(
                    batch_size=128 if demo else 2048,
                    lr=1e-4 if demo else 1e-6,
                    weight_decay=0.1,
                    clip_low=0.2,
                    clip_high=0.28,
                    max_grad_norm=1.0,
                    mini_batches=4,
                    stream_minibatch=True,
                    max_staleness=2 if demo else 8,
                ),
                gpus_per_replica=trainers,
                wait_for=("inference",),
            ),
            ServiceGroup(
                id="rollout",
                config=RolloutConfig(
                    group_size=8,
                    window=None,
                ),
                wait_for=("inference",),
            ),
        ),
    )
