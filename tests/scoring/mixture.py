"""A recipe in which two teachers share the work by domain, and some prompts have none; and its data."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshy.data.addition import addition
from meshy.data.task import Example, Task
from meshy.importing import load_file
from meshy.recipe import Recipe, ServiceGroup
from meshy.training.terms import LossTerm

OPD = load_file("recipes/opd.py")


def domain_of(digits: int) -> str | None:
    return {1: "short", 2: "short", 3: None}.get(digits, "long")


def data(**options: Any) -> Task:
    """Addition, each prompt with the domain that its numbers' length makes it."""

    def with_domain(example: Example) -> Example:
        return dataclasses.replace(example, info={**example.info, "domain": domain_of(example.info["digits"])})

    task = addition(**options)
    return dataclasses.replace(
        task, train=[with_domain(e) for e in task.train], evaluation=[with_domain(e) for e in task.evaluation]
    )


def recipe(gpus: int = 4) -> Recipe:
    """recipes/opd.py with two teachers, GRPO beside their loss."""
    plain: Recipe = OPD.recipe(gpus=3)
    teacher = dataclasses.replace(plain.group("teacher").config, evaluate=0)
    trainer = dataclasses.replace(
        plain.group("trainer").config,
        batch_size=48,
        lr=1e-4,
        advantage="meshy.algorithms.advantages.grpo:grpo_advantage",
        loss="meshy.algorithms.losses.ppo_clip:ppo_clip_loss",
        terms=(LossTerm(loss="meshy.algorithms.losses.student_topk:student_topk_loss", weight=0.5, name="teachers"),),
    )
    rollout = dataclasses.replace(
        plain.group("rollout").config, group_size=4, routes=("short", "long"), eval_every=0, eval_prompts=32
    )
    return dataclasses.replace(
        plain,
        name="mixture",
        data=data,
        steps=3,
        groups=(
            plain.group("inference"),
            *(
                ServiceGroup(
                    id=f"{route}_teacher",
                    config=dataclasses.replace(teacher, route=route),
                    gpus_per_replica=1,
                    wait_for=("inference",),
                )
                for route in ("short", "long")
            ),
            dataclasses.replace(plain.group("trainer"), config=trainer),
            dataclasses.replace(
                plain.group("rollout"), config=rollout, wait_for=("inference", "short_teacher", "long_teacher")
            ),
        ),
    )
