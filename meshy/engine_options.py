"""What every role with a model under TorchTitan can be told of its engine, and of its optimiser if it learns.
Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from meshy.recipe import MAY_BE_INFINITE, Limit, Recipe, ServiceConfig, out_of_range


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ServiceConfig):
    """packing: "packed" rows hold samples one after another, without padding; "padded" rows one each.
    tokens_per_micro_batch: bound on a forward pass, padding included; None takes 16384 on GPUs and 1024 on CPUs, where
    what fits the caches is fastest, or a whole row if that is longer. dtype: of stored parameters and optimiser state;
    mixed_precision: of the parameters while they compute; "auto" is bfloat16 on GPUs and float32 on CPUs. spmd_backend:
    TorchTitan's; torch 2.13 takes "partial_dtensor" only. collective_timeout: seconds that ranks wait for one another
    at most.
    """

    processes: ClassVar[Literal["one", "per_host", "per_gpu"]] = "per_gpu"

    packing: Literal["packed", "padded"] = "packed"
    tokens_per_micro_batch: int | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    mixed_precision: Literal["auto", "float32", "bfloat16"] = "auto"
    spmd_backend: Literal["partial_dtensor", "spmd_types", "full_dtensor"] = "partial_dtensor"
    compile: bool = False
    collective_timeout: float = 600.0

    def in_ring(self, recipe: Recipe) -> bool:
        """Whether it shares its GPUs with other roles."""
        own = {group.id for group in recipe.groups if group.config is self}
        return any(id in own for ring in recipe.rings for id, _ in ring.members)

    def faults(self, recipe: Recipe) -> list[str]:
        limits: tuple[Limit, ...] = (
            (self.collective_timeout > 0, "collective_timeout", self.collective_timeout, "more than 0 seconds"),
            (
                self.tokens_per_micro_batch is None or self.tokens_per_micro_batch >= recipe.context_length,
                "tokens_per_micro_batch", self.tokens_per_micro_batch,
                f"at least the recipe's context_length ({recipe.context_length}), so that every row fits, or none",
            ),
        )  # fmt: skip
        return out_of_range(limits)


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(EngineOptions):
    """AdamW (arXiv 1711.05101). warmup_steps: optimiser steps over which the learning rate rises to `lr`.
    max_grad_norm: gradients of a larger norm are scaled down to it; inf: none are."""

    lr: float = 1e-6
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = field(default=1.0, metadata=MAY_BE_INFINITE)

    def faults(self, recipe: Recipe) -> list[str]:
        limits: tuple[Limit, ...] = (
            (self.lr >= 0, "lr", self.lr, "0 or more"),
            (self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "0 or more"),
            (all(0 <= b < 1 for b in self.betas), "betas", self.betas, "two numbers of at least 0 and below 1"),
            (self.eps > 0, "eps", self.eps, "more than 0"),
            (self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more"),
            (self.max_grad_norm > 0, "max_grad_norm", self.max_grad_norm, "more than 0 (inf for no clipping)"),
        )
        faults = out_of_range(limits)
        return faults + super().faults(recipe)
