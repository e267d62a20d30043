"""Roles of the pace benchmark, outside the package: an engine and a trainer that cost time, but compute nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from meshy.recipe import Recipe, ServiceConfig


@dataclass(frozen=True, kw_only=True)
class SleepingEngineConfig(ServiceConfig):
    """Speaks SGLang's protocol as far as rollout does, and loads no model.

    slots: responses that are written at once; 16 x 32 stands for 16 replicas in one process. step_seconds: of a decode
    step, whatever the number of responses. mean_length, sigma: of the log-normal lengths, in tokens; the length of a
    response follows from its request's seed, so that a `deterministic` recipe knows them all beforehand (see
    `pace/lengths.py`). token, end_token: what responses consist of, and what ends them.
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
