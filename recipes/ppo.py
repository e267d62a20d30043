"""PPO with a critic, and a reference that the policy stays near to; every service on GPUs (or CPU slots) of its own.

    torchrun --standalone --nproc-per-node 4 -m meshy.ignitor recipes/ppo.py
    torchrun --standalone --nproc-per-node 8 -m meshy.ignitor recipes/ppo.py model=Qwen/Qwen3-1.7B

Four models meet in the rows of one partition: the policy's tokens, the reference's log-probs, the critic's values. The
trainer takes a row when all of it is there, charges each token its KL to the reference, and learns by GAE; the critic
learns the same returns. The policy begins when the critic has learnt from `frozen_batches`, which a run of a few steps
must lower.
"""

from pathlib import Path

from meshy.algorithms.kl_reward import KLInReward
from meshy.inference.config import InferenceConfig
from meshy.recipe import Recipe, Sampling, ServiceGroup
from meshy.rollout.config import RolloutConfig
from meshy.scoring.config import ReferenceConfig
from meshy.scoring.critic_config import CriticConfig
from meshy.training.config import TrainerConfig

DEMO_MODEL = str(Path(__file__).parent / "demo_model")


def recipe(model: str = DEMO_MODEL, data: str | None = None, gpus: int = 4) -> Recipe:
    """`gpus` is filled in with the size of the run: a quarter for each of the four models."""
    demo = model == DEMO_MODEL
    part = max(1, gpus // 4)
    return Recipe(
        model=model,
        data=data or ("meshy.data.addition:addition" if demo else "meshy.data.gsm8k:gsm8k"),
        steps=60 if demo else 200,
        deterministic=demo,
        sampling=Sampling(temperature=1.0, max_new_tokens=80 if demo else 1024),
        context_length=128 if demo else 2048,
        groups=(
            ServiceGroup(id="inference", config=InferenceConfig(), replicas=part, gpus_per_replica=1),
            ServiceGroup(id="reference", config=ReferenceConfig(), gpus_per_replica=part),
            ServiceGroup(
                id="critic",
                config=CriticConfig(lr=1e-3 if demo else 1e-5, epochs=2),
                gpus_per_replica=part,
            ),
            ServiceGroup(
                id="trainer",
                config=TrainerConfig(
                    batch_size=128 if demo else 1024,
                    lr=1e-4 if demo else 1e-6,
                    also_consumes=("values",),
                    kl_in_reward=KLInReward(reference="ref_logprobs", coef=0.002),
                    advantage=None,
                    token_advantage="meshy.algorithms.advantages.gae:gae_advantage",
                    token_advantage_options={"gamma": 1.0, "lam": 0.95},
                    frozen_batches=4,  # while the critic warms up
                ),
                gpus_per_replica=max(1, gpus - 3 * part),
                wait_for=("inference",),
            ),
            ServiceGroup(
                id="rollout",
                config=RolloutConfig(group_size=1, window=1),
                wait_for=("inference", "reference", "critic"),
            ),
        ),
    )
