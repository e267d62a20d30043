"""On-policy distillation: a student learns from its own answers, of which a better teacher scores every token.

    torchrun --standalone --nproc-per-node 3 -m meshy.ignitor recipes/opd.py
    torchrun --standalone --nproc-per-node 1 -m meshy.ignitor recipes/opd.py colocated=true
    torchrun --standalone --nproc-per-node 8 -m meshy.ignitor recipes/opd.py model=Qwen/Qwen3-1.7B teacher=Qwen/Qwen3-8B

At each token that the student writes it tells its likeliest candidates; the teacher says how likely it finds them, and
the student is pulled towards it (reverse KL). No reward is learnt from; it is measured all the same. The layouts differ
in where the services run, and in nothing else.
"""

from pathlib import Path

from meshy.inference.config import InferenceConfig
from meshy.recipe import FALLBACK, ON_DEMAND, ColocationRing, Recipe, Sampling, ServiceGroup
from meshy.rollout.config import RolloutConfig
from meshy.scoring.config import TeacherConfig
from meshy.training.config import TrainerConfig

HERE = Path(__file__).parent
DEMO_MODEL, DEMO_TEACHER = str(HERE / "demo_model"), str(HERE / "demo_teacher")


def recipe(
    model: str = DEMO_MODEL,
    teacher: str = DEMO_TEACHER,
    data: str | None = None,
    colocated: bool = False,
    gpus: int = 3,
) -> Recipe:
    """`gpus` is filled in with the size of the run. colocated: all three take turns on all of them; else a third
    generates, a third scores, and the rest train."""
    demo = model == DEMO_MODEL
    part = gpus if colocated else max(1, gpus // 3)
    shared = "inference" if colocated else None
    ring = ColocationRing(id="gpus", members=(("inference", FALLBACK), ("teacher", ON_DEMAND), ("trainer", ON_DEMAND)))
    return Recipe(
        model=model,
        data=data or ("meshy.data.addition:addition" if demo else "meshy.data.gsm8k:gsm8k"),
        steps=16 if demo else 200,
        deterministic=demo,
        sampling=Sampling(temperature=1.0, max_new_tokens=80 if demo else 1024),
        context_length=128 if demo else 2048,
        groups=(
            ServiceGroup(
                id="inference",
                config=InferenceConfig(),
                replicas=part,
                gpus_per_replica=1,
            ),
            ServiceGroup(
                id="teacher",
                config=TeacherConfig(model=teacher, scores=("candidates",), evaluate=256),
                gpus_per_replica=part,
                colocate_with=shared,
                wait_for=("inference",),
            ),
            ServiceGroup(
                id="trainer",
                config=TrainerConfig(
                    batch_size=128 if demo else 512,
                    lr=3e-4 if demo else 1e-6,
                    advantage=None,
                    loss="meshy.algorithms.losses.student_topk:student_topk_loss",
                    also_consumes=("student_topk_ids", "teacher_topk_logprobs"),
                ),
                gpus_per_replica=part if colocated else max(1, gpus - 2 * part),
                colocate_with=shared,
                wait_for=("inference",),
            ),
            ServiceGroup(
                id="rollout",
                config=RolloutConfig(group_size=1, window=1, candidates=8, eval_every=2 if demo else 10),
                wait_for=("inference", "teacher"),
            ),
        ),
        rings=(ring,) if colocated else (),
    )
