"""The configuration of inference. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from meshy.recipe import Recipe, ServiceConfig

Engine = Literal["auto", "embedded", "sglang"]
DType = Literal["auto", "float32", "bfloat16", "float16"]

_OF_SGLANG = (
    "python", "tp", "ep", "dp", "memory_fraction", "memory_saver", "quantization", "server_args", "startup_deadline",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class InferenceConfig(ServiceConfig):
    """Answers generation requests over SGLang's HTTP protocol, on the replica's endpoint port.

    engine: `embedded` runs in the service's own process, on any machine; `sglang` starts SGLang's server as a child of
        the service. `auto` takes SGLang where there is a GPU and SGLang is installed, else the embedded engine; the
        log and `/health` say which and why.
    dtype: of weights and computation; `auto` keeps the model's own (but SGLang on GPUs serves float32 in bfloat16). The
        trainer computes log-probs of its own, so a lower precision here shows as mismatch there.
    max_running_requests: generated at once by one replica; more wait their turn.
    context_length: prompt and response together, in tokens; None takes the recipe's.
    threads: CPU threads of the engine; None: one, since services share the cores.

    These are of SGLang alone:

    python: the interpreter that runs it; None: this one, if SGLang is installed in it, else `.venv-sglang` of the
        checkout, which `make sglang` sets up.
    tp, ep, dp: GPUs over which each layer is split; among which experts are spread; engines behind one endpoint. tp
        None: gpus_per_replica / dp. A replica may span hosts.
    memory_fraction: share of GPU memory for weights and cache; None leaves it to SGLang. memory_saver: weights and
        cache can be released and taken back; None: in a ring on GPUs, where they must. quantization: of the weights
        (`fp8` ...).
    server_args: any other argument of `sglang.launch_server`, with underscores: `{"attention_backend": "fa3"}`.
    startup_deadline: seconds until the server must be ready, model loaded.
    """

    service: ClassVar[str] = "meshy.inference.service:InferenceService"
    serves_http: ClassVar[bool] = True
    processes: ClassVar[Literal["one", "per_host", "per_gpu"]] = "per_host"

    engine: Engine = "auto"
    dtype: DType = "auto"
    max_running_requests: int = 128
    context_length: int | None = None
    threads: int | None = None
    max_restarts: int = 3

    python: str | None = None
    tp: int | None = None
    ep: int = 1
    dp: int = 1
    memory_fraction: float | None = None
    memory_saver: bool | None = None
    quantization: str | None = None
    server_args: Mapping[str, Any] = field(default_factory=dict)
    startup_deadline: float = 1800.0

    def faults(self, recipe: Recipe) -> list[str]:
        faults = []
        for name in ("max_running_requests", "threads", "tp", "ep", "dp"):
            value = getattr(self, name)
            if value is not None and value < 1:
                faults.append(f"{name}: expected at least 1, got {value}")
        if self.context_length is not None and self.context_length < recipe.context_length:
            faults.append(
                f"context_length: {self.context_length} is below the recipe's context_length="
                f"{recipe.context_length}: longer episodes would be refused; raise it or leave it none"
            )
        if self.startup_deadline <= 0:
            faults.append(f"startup_deadline: expected more than 0 seconds, got {self.startup_deadline}")
        if self.engine == "embedded":
            return faults + self._embedded_faults(recipe)
        if self.memory_fraction is not None and not 0 < self.memory_fraction < 1:
            faults.append(f"memory_fraction: expected a share in (0, 1), got {self.memory_fraction}")
        return faults or self._size_faults(recipe)

    def preflight(self, recipe: Recipe) -> list[str]:
        from meshy.inference.preflight import engine_faults

        return engine_faults(self, recipe)

    def gpus(self, recipe: Recipe) -> int:
        """GPUs of one replica."""
        return next((group.gpus_per_replica for group in recipe.groups if group.config is self), 1)

    def tp_of(self, recipe: Recipe) -> int:
        """`tp`, or what follows from the replica's GPUs."""
        return self.tp or max(1, self.gpus(recipe) // self.dp)

    def ring(self, recipe: Recipe) -> tuple[str, ...]:
        """The groups with which this one takes turns on its GPUs, itself included; none outside a ring."""
        own = next((group.id for group in recipe.groups if group.config is self), None)
        for ring in recipe.rings:
            ids = tuple(id for id, _ in ring.members)
            if own in ids:
                return ids
        return ()

    def saves_memory(self, recipe: Recipe, on_gpu: bool) -> bool:
        """`memory_saver`, or what follows from the ring."""
        return (on_gpu and bool(self.ring(recipe))) if self.memory_saver is None else self.memory_saver

    def backs_up_weights(self, recipe: Recipe, on_gpu: bool) -> bool:
        """Whether SGLang must keep a copy of weights that it releases: no trainer is in the ring to leave them."""
        trains = any(recipe.group(id).config.ends_run for id in self.ring(recipe))
        return on_gpu and bool(self.ring(recipe)) and not trains

    def _embedded_faults(self, recipe: Recipe) -> list[str]:
        faults = []
        if self.gpus(recipe) > 1:
            faults.append(
                "gpus_per_replica: the embedded engine computes on one GPU; set it to 1 and take more replicas"
            )
        faults += [f"{name}: only SGLang knows this; leave it out, or set engine='sglang'" for name in self.of_sglang]
        return faults

    @property
    def of_sglang(self) -> list[str]:
        """Fields that are set here and that only SGLang knows."""
        defaults = InferenceConfig()
        return [name for name in _OF_SGLANG if getattr(self, name) != getattr(defaults, name)]

    def _size_faults(self, recipe: Recipe) -> list[str]:
        gpus, tp = max(1, self.gpus(recipe)), self.tp_of(recipe)
        faults = []
        if tp * self.dp != gpus:
            faults.append(
                f"tp: tp={tp} x dp={self.dp} do not make up gpus_per_replica={gpus}; change one of them"
                + ("" if self.tp else " (tp is gpus_per_replica / dp unless it is set)")
            )
        elif tp % self.ep:
            faults.append(f"ep: experts are spread within the tp={tp} GPUs of a layer, which ep={self.ep} must divide")
        return faults
