"""A trainer of the tests' own, tasks with as many prompts as a test wants, and rewards that fail."""

from __future__ import annotations

import dataclasses
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from meshy.columns import (
    EVAL,
    EVAL_COLUMNS,
    GATE_COLUMNS,
    GEN_GATE,
    TRAIN,
    TRAIN_COLUMNS,
    Consumes,
    Produces,
)
from meshy.data.task import Example, Task
from meshy.recipe import Recipe, Sampling, ServiceConfig, ServiceGroup
from meshy.rewards.sample import RewardSample
from meshy.rollout.config import RolloutConfig

HERE = "tests.rollout.roles"
MODEL = "recipes/demo_model"


@dataclass(frozen=True, kw_only=True)
class Learner(ServiceConfig):
    """Reads rows and writes gates, as the trainer does; the tests play its part themselves."""

    service: ClassVar[str] = "nowhere:Learner"
    processes: ClassVar[Literal["one", "per_host", "per_gpu"]] = "one"
    batch_size: int = 8
    max_staleness: int | None = None
    also: tuple[str, ...] = ()

    def consumes(self, recipe: Recipe) -> tuple[Consumes, ...]:
        return (
            Consumes(TRAIN, (*TRAIN_COLUMNS, *self.also), end=True),
            Consumes(GEN_GATE, GATE_COLUMNS, consumer="gates", end=True),
            Consumes(EVAL, EVAL_COLUMNS, consumer="evaluations", end=True),
        )

    def produces(self, recipe: Recipe) -> tuple[Produces, ...]:
        return (Produces(GEN_GATE, GATE_COLUMNS, creates=True),)


@dataclass(frozen=True, kw_only=True)
class Engine(ServiceConfig):
    service: ClassVar[str] = "nowhere:Engine"
    serves_http: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Watcher(ServiceConfig):
    """A role of somebody's own that wants to see every gate."""

    service: ClassVar[str] = "nowhere:Watcher"

    def consumes(self, recipe: Recipe) -> tuple[Consumes, ...]:
        return (Consumes(GEN_GATE, GATE_COLUMNS, per_replica=True),)


def recipe_of(
    rollout: RolloutConfig | None = None,
    *,
    batch_size: int = 8,
    max_staleness: int | None = None,
    learner: Learner | None = None,
    replicas: int = 1,
    inference: ServiceConfig | None = None,
    also: tuple[ServiceGroup, ...] = (),
    **fields: Any,
) -> Recipe:
    """A recipe with one engine, one learner and `replicas` of rollout, which is small unless fields say otherwise.
    also: further groups."""
    defaults: dict[str, Any] = {
        "name": "test",
        "model": MODEL,
        "data": f"{HERE}:counting",
        "steps": 3,
        "sampling": Sampling(max_new_tokens=12),
        "context_length": 64,
    }
    return Recipe(
        groups=(
            ServiceGroup(id="inference", config=inference or Engine(), gpus_per_replica=1),
            ServiceGroup(id="trainer", config=learner or Learner(batch_size=batch_size, max_staleness=max_staleness)),
            ServiceGroup(id="rollout", config=rollout or RolloutConfig(group_size=4), replicas=replicas),
            *also,
        ),
        **{**defaults, **fields},
    )


def recipe() -> Recipe:
    """Two replicas of rollout, for processes that load this file."""
    return recipe_of(RolloutConfig(group_size=2), replicas=2, steps=2, name="two_replicas")


# Tasks ----------------------------------------------------------------------------------------------------------------


def example(id: str, text: str, **fields: Any) -> Example:
    return Example(**{"id": id, "messages": ({"role": "user", "content": text},), "answer": text, **fields})


def counting(
    *,
    seed: int = 0,
    train: int = 16,
    evaluation: int = 4,
    reward: str = f"{HERE}:length",
    shared: int = 0,
    file: str = "",
) -> Task:
    """Prompts `t0, t1 ...` to train on and `e0, e1 ...` to evaluate on, of which the first `shared` stand in train.
    file: for the reward."""
    return Task(
        name="counting",
        train=tuple(example(f"train-{i}", f"t{i}", info={"train": True, "file": file}) for i in range(train)),
        evaluation=tuple(
            example(f"eval-{i}", f"{'t' if i < shared else 'e'}{i}", info={"file": file}) for i in range(evaluation)
        ),
        reward=reward,
    )


def domains(*, seed: int = 0) -> Task:
    """Prompts of counting, of domain math, code and none in turn."""
    task = counting(seed=seed)
    of = ("math", "code", None)
    train = tuple(dataclasses.replace(one, info={"domain": of[i % 3]}) for i, one in enumerate(task.train))
    return dataclasses.replace(task, name="domains", train=train)


def long_prompt(*, seed: int = 0, split: str = "train") -> Task:
    """One prompt of 200 characters among short ones, in train or in evaluation."""
    prompts = {"train": [example("a", "x"), example("b", "y")], "evaluation": [example("c", "z")]}
    prompts[split].append(example("long", "0123456789" * 20))
    return Task(name="long", **prompts, reward=f"{HERE}:length")


def no_chat(*, seed: int = 0) -> Task:
    """Two prompts of three are no list of messages."""
    train = (example("good", "x"), example("bad", "y", messages="a string"), example("empty", "z", messages=()))
    return Task(name="no chat", train=train, evaluation=(example("e", "e"),), reward=f"{HERE}:length")


def raising(*, seed: int = 0) -> Task:
    raise OSError("the disk with the data is gone")


def a_list(*, seed: int = 0) -> list[int]:
    return [1, 2, 3]


NOT_A_FUNCTION = 3


# Routes ---------------------------------------------------------------------------------------------------------------


def by_number(example: Example) -> str:
    return "odd" if int(example.id.removeprefix("train-")) % 2 else "even"


def raising_for_some(example: Example) -> str | None:
    """Raises where the domain is code."""
    if example.info["domain"] == "code":
        raise ValueError("no code here")
    return example.info["domain"]


def unhashable(example: Example) -> list[str]:
    return [example.info["domain"]]


# Rewards --------------------------------------------------------------------------------------------------------------


def length(sample: RewardSample) -> float:
    return float(len(sample.response))


def failing_for_some(sample: RewardSample) -> float:
    """Raises for prompts whose number is divisible by 3."""
    text = str(sample.answer)
    if text.startswith("t") and int(text[1:]) % 3 == 0:
        raise ValueError(f"no score for {text}")
    return float(len(sample.response))


def failing_for_one_held_out(sample: RewardSample) -> float:
    if sample.answer == "e0":
        raise ValueError("no score for e0")
    return 1.0


def hanging_for_one(sample: RewardSample) -> float:
    """Never returns for prompt `t1`."""
    while sample.answer == "t1":
        time.sleep(1e9)
    return 1.0


def always_hanging(sample: RewardSample) -> float:
    while True:
        time.sleep(1e9)


def always_failing(sample: RewardSample) -> float:
    raise ValueError("this reward fails always")


def same(sample: RewardSample) -> float:
    return 0.5


def varied(sample: RewardSample) -> float:
    """Another one for any two responses, as good as."""
    return float(zlib.crc32(sample.response.encode()))


def same_for_one(sample: RewardSample) -> float:
    return 1.0 if sample.answer == "t1" else varied(sample)


def held_out_waits_for_file(sample: RewardSample) -> float:
    """Held-out answers are scored once the file is there."""
    while "train" not in sample.info and not Path(sample.info["file"]).exists():
        time.sleep(0.01)
    return 1.0


def raising_once_and_same_for_one(sample: RewardSample) -> float:
    """Raises for the one that can take the file away."""
    try:
        Path(sample.info["file"]).unlink()
    except FileNotFoundError:
        return same_for_one(sample)
    raise ValueError("this reward fails once")
