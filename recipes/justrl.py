"""JustRL (arXiv 2512.16649): plain GRPO with fixed settings on a 1.5B model, in lock step, all on the same 8 GPUs.

    torchrun --nproc-per-node 8 -m meshy.ignitor recipes/justrl.py
    torchrun --standalone --nproc-per-node 2 -m meshy.ignitor recipes/justrl.py \
        model=recipes/demo_model data=meshy.data.addition:addition

With the demo model it learns addition on a CPU, with sizes that fit one. justrl_async.py and justrl_fully_async.py
differ from this in fields only.
"""

from pathlib import Path

from meshy.inference.config import InferenceConfig
from meshy.recipe import FALLBACK, ON_DEMAND, ColocationRing, Recipe, Sampling, ServiceGroup
from meshy.rollout.config import RolloutConfig
from meshy.training.config import TrainerConfig

MODEL = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
DATA = "meshy.data.dapo_math:dapo_math"


def recipe(model: str = MODEL, data: str = DATA, gpus: int = 8) -> Recipe:
    """`gpus` is filled in with the size of the run: each has an engine of its own, and the trainer spans all."""
    demo = Path(model).name == "demo_model"
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
                replicas=gpus,
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
                ),
                gpus_per_replica=gpus,
                colocate_with="inference",
                wait_for=("inference",),
            ),
            ServiceGroup(
                id="rollout",
                config=RolloutConfig(
                    group_size=8,
                    window=1,
                ),
                wait_for=("inference",),
            ),
        ),
        rings=(ColocationRing(id="gpus", members=(("inference", FALLBACK), ("trainer", ON_DEMAND))),),
    )
