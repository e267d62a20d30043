"""Roles of the pace benchmark, outside the package: an engine and a trainer that cost time, but compute nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from meshy.data.task import Example, Task
from meshy.recipe import Recipe, ServiceConfig
from meshy.rewards.sample import RewardSample
from meshy.rollout.config import RolloutConfig
from meshy.training.config import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class SleepingEngineConfig(ServiceConfig):
    """Speaks SGLang's protocol as far as rollout does, and loads no model.

    slots: responses that are written at once. step_seconds: of a decode step, whatever the number of responses.
    mean_length, sigma: of the log-normal lengths, in tokens; the length of a response follows from its request's seed,
    so that a `deterministic` recipe knows them all beforehand (see `pace/lengths.py`). token, end_token: what responses
    consist of, and what ends them.
    """

    service: ClassVar[str] = "scripts.bench.pace.engine:SleepingEngine"
    serves_http: ClassVar[bool] = True

    slots: int = 32
    step_seconds: float = 0.002
    mean_length: float = 200.0
    sigma: float = 1.0
    token: int = 71
    end_token: int = 1

    def faults(self, recipe: Recipe) -> list[str]:
        faults = []
        if self.slots < 1:
            faults.append(f"slots: expected at least 1, got {self.slots}")
        if self.step_seconds <= 0:
            faults.append(f"step_seconds: expected more than 0, got {self.step_seconds}")
        if not recipe.deterministic:
            faults.append("deterministic: set it to true, else the lengths of responses are not known beforehand")
        return faults


@dataclass(frozen=True, kw_only=True)
class SleepingTrainerConfig(TrainerConfig):
    """Takes parts of batches as the trainer does, sleeps `token_seconds` for each token that the policy wrote instead
    of learning from it, and opens the next gate. Of the trainer's settings those on what is trained count, and
    publish_to: groups whose engines are told the version."""

    service: ClassVar[str] = "scripts.bench.pace.trainer:SleepingTrainer"
    processes: ClassVar[Literal["one", "per_host", "per_gpu"]] = "one"

    token_seconds: float

    def faults(self, recipe: Recipe) -> list[str]:
        return super().faults(timed(recipe))


@dataclass(frozen=True, kw_only=True)
class SeededRolloutConfig(RolloutConfig):
    """The real rollout. A `deterministic` run's requests carry seeds, from which their lengths follow; that is wanted
    at every window, though beyond lock step no run repeats itself."""

    def faults(self, recipe: Recipe) -> list[str]:
        return super().faults(timed(recipe))


def timed(recipe: Recipe) -> Recipe:
    """The recipe as one that need not repeat itself."""
    return replace(recipe, deterministic=False)


def numbered(*, seed: int = 0, prompts: int = 4096) -> Task:
    """Prompts that say nothing, as many as a run needs."""
    train = tuple(
        Example(id=f"p{i}", messages=({"role": "user", "content": str(i)},), answer="") for i in range(prompts)
    )
    held_out = (Example(id="held out", messages=({"role": "user", "content": "?"},), answer=""),)
    return Task(name="numbered", train=train, evaluation=held_out, reward="scripts.bench.pace.roles:even_or_odd")


def even_or_odd(sample: RewardSample) -> float:
    return float(len(sample.response) % 2)
