"""The configuration of inference. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from meshy.recipe import Recipe, ServiceConfig

Engine = Literal["auto", "embedded", "sglang"]
DType = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class InferenceConfig(ServiceConfig):
    """Answers generation requests over SGLang's HTTP protocol, on the replica's endpoint port.

    engine: `embedded` runs in the service's own process, on any machine; `auto` chooses it.
    dtype: of weights and computation; `auto` keeps the model's own. The trainer computes log-probs of its own, so a
        lower precision here shows as mismatch there.
    max_running_requests: generated at once by one replica; more wait their turn.
    context_length: prompt and response together, in tokens; None takes the recipe's.
    threads: CPU threads of the engine; None: one, since services share the cores.
    """

    service: ClassVar[str] = "meshy.inference.service:InferenceService"
    serves_http: ClassVar[bool] = True

    engine: Engine = "auto"
    dtype: DType = "auto"
    max_running_requests: int = 128
    context_length: int | None = None
    threads: int | None = None

    def faults(self, recipe: Recipe) -> list[str]:
        faults = []
        if self.engine == "sglang":
            faults.append(
                "engine: this version of Meshy runs the embedded engine only; set engine='embedded' "
                "(SGLang arrives with the `sglang` extra)"
            )
        if self.max_running_requests < 1:
            faults.append(f"max_running_requests: expected at least 1, got {self.max_running_requests}")
        if self.threads is not None and self.threads < 1:
            faults.append(f"threads: expected at least 1, or none, got {self.threads}")
        if self.context_length is not None and self.context_length < recipe.context_length:
            faults.append(
                f"context_length: {self.context_length} is below the recipe's context_length="
                f"{recipe.context_length}: longer episodes would be refused; raise it or leave it none"
            )
        wide = [g.id for g in recipe.groups if g.config is self and g.gpus_per_replica > 1]
        if wide:
            faults.append(
                "gpus_per_replica: the embedded engine computes on one GPU; set it to 1 and take more replicas"
            )
        return faults
