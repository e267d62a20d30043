"""An SGLang server as the engine of a replica, or of one host's part of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from meshy.generation import commands
from meshy.generation.commands import Command
from meshy.inference.config import InferenceConfig
from meshy.inference.model_config import read_model_config, tensor_sizes
from meshy.inference.parts import Parts
from meshy.inference.sglang import memory
from meshy.inference.sglang.arguments import ServerPlan
from meshy.inference.sglang.server import SglangFailure, SglangServer
from meshy.observe.ask import ask_json
from meshy.service.base import Service

ASK_DEADLINE = 2.0
BUSY_LOOK_SECONDS = 0.25  # the timeline tells of SGLang's work to this grain


class SglangReplica:
    """`start` returns once the server is ready. On a further host of the replica (node > 0) it serves nobody."""

    def __init__(self, service: Service, python: Path, folder: Path, version: int) -> None:
        self._service = service
        self._config: InferenceConfig = service.config
        self.server = SglangServer(plan_of(service, python, folder, version))
        self._leads = self.server.plan.node == 0
        self._complained = False
        self._freed = False
        self._sizes = tensor_sizes(folder)

    def start(self) -> None:
        plan = self.server.plan
        if self._service.recipe.deterministic and not plan.on_gpu:
            self._service.log.warning(
                "the recipe is deterministic, but SGLang on CPU draws its random numbers without regard to the "
                "requests' seeds: texts will differ from run to run. engine='embedded' repeats them bit for bit"
            )
        self.server.start()
        if self._leads:
            began = time.monotonic()
            self.server.wait_ready(self._config.startup_deadline)
            seconds = time.monotonic() - began
            self._service.log.info("SGLang serves at http://%s:%d after %.1f s", plan.host, plan.port, seconds)

    def wait(self) -> None:
        """Until the server ends, which is a failure."""
        busy_since: float | None = None
        while True:
            busy = self._leads and self._running() > 0
            now = time.time()
            if busy and busy_since is not None:
                self._service.timeline.record("decode", busy_since, now)
            busy_since = now if busy else None
            self.server.wait_for_end(BUSY_LOOK_SECONDS)

    def _running(self) -> int:
        try:
            return int(self._loads()["running"])
        except ValueError as error:
            if not self._complained:
                self._complained = True
                self._service.log.warning("the timeline does not tell when SGLang works: %s", error)
        except OSError as error:  # it answers late, or is ending, which `wait_for_end` sees
            self._service.log.debug("SGLang does not tell its load: %s", error)
        return 0

    @property
    def keeps_weights(self) -> bool:
        plan = self.server.plan
        return not plan.memory_saver or plan.weights_backup or bool(plan.extra.get("enable_weights_cpu_backup"))

    def version(self) -> str:
        return str(self._tell(commands.MODEL_INFO)["weight_version"])

    def free(self) -> Parts:
        self._freed = True
        return memory.free(self._tell)

    def restore(self, folder: Path | None, version: int | None) -> Parts:
        if folder is not None:
            self._refuse_other_model(folder)
        parts = memory.restore(self._tell, folder, version)
        self._freed = False
        return parts

    def checksums(self) -> list[dict[str, Any]]:
        ranks: list[dict[str, Any]] = self._tell(commands.CHECKSUM)["ranks"]
        return ranks

    def _refuse_other_model(self, folder: Path) -> None:
        """SGLang itself loads what fits, passes over the rest, and calls it a success."""
        other = tensor_sizes(folder)
        differs = [name for name, value in self._sizes.items() if other.get(name) != value]
        if differs:
            told = "; ".join(f"{name} is {other.get(name)!r}, not {self._sizes[name]!r}" for name in differs)
            raise SglangFailure(f"the weights in {folder} are of another model: {told}")

    def _tell(self, command: Command) -> Any:
        return self.server.tell(command, self._config.startup_deadline)

    def close(self) -> None:
        self.server.close()

    def health(self) -> dict[str, Any]:
        plan = self.server.plan
        told: dict[str, Any] = {"server_pid": self.server.pid, "node": plan.node, "nodes": plan.nodes}
        if not self._leads:
            return told
        try:
            version, loads = self._version(), self._loads()
        except (OSError, TimeoutError, ValueError) as error:
            return told | {"server": f"does not answer ({type(error).__name__})"}
        return told | {
            "weight_version": version,
            "freed": self._freed,
            "running": int(loads["running"]),
            "queued": int(loads["queued"]),
        }

    def metrics(self) -> dict[str, float]:
        if not self._leads:
            return {}
        try:
            version, loads = self._version(), self._loads()
        except (OSError, TimeoutError, ValueError):
            return {}  # a scrape that finds nothing; the watch over the process tells of its end
        return loads | {"weight_version": float(version) if version.isdecimal() else -1.0}

    def _loads(self) -> dict[str, float]:
        """What `/v1/loads` says, over all dp engines. OSError, TimeoutError or ValueError where it does not."""
        return loads_of(*ask_json(self.server.plan.host, self.server.plan.port, "/v1/loads", ASK_DEADLINE))

    def _version(self) -> str:
        """The weight version that it serves. OSError, TimeoutError or ValueError where it does not say."""
        status, info = ask_json(self.server.plan.host, self.server.plan.port, "/model_info", ASK_DEADLINE)
        if status != 200 or not isinstance(info, dict) or "weight_version" not in info:
            raise ValueError(f"/model_info answered {status} {str(info)[:300]!r}")
        return str(info["weight_version"])


def loads_of(status: int, answer: Any) -> dict[str, float]:
    """The answer to `/v1/loads`, summed over dp engines. Raises ValueError for anything else."""
    try:
        if status != 200:
            raise ValueError("not a success")
        loads = answer["loads"]
        return {
            "running": sum(load["num_running_reqs"] for load in loads),
            "queued": sum(load["num_waiting_reqs"] + load["queues"]["paused"] for load in loads),
            "used_tokens": sum(load["num_used_tokens"] for load in loads),
            "tokens_per_second": sum(load["gen_throughput"] for load in loads),
            "cache_hit_rate": sum(load["cache_hit_rate"] for load in loads) / max(1, len(loads)),
        }
    except (KeyError, TypeError, ValueError) as error:
        told = f"/v1/loads answered {status} {str(answer)[:300]!r}"
        raise ValueError(f"{told}, which is not SGLang's ({type(error).__name__}: {error})") from error


def plan_of(service: Service, python: Path, folder: Path, version: int) -> ServerPlan:
    """The server of this process, from topology and configuration."""
    config: InferenceConfig = service.config
    context, recipe = service.context, service.recipe
    replica = context.replica
    return ServerPlan(
        python=python,
        model=read_model_config(folder),
        host=context.process.host,
        port=context.process.first_port,
        rendezvous=f"{replica.host}:{replica.distributed_port}",
        on_gpu=service.device.type == "cuda",
        dtype=config.dtype,
        context_length=config.context_length or recipe.context_length,
        max_running_requests=config.max_running_requests,
        weight_version=version,
        random_seed=recipe.seed + replica.index,
        tp=config.tp_of(recipe),
        ep=config.ep,
        dp=config.dp,
        node=context.rank,
        nodes=context.world_size,
        threads=config.threads or 1,
        memory_fraction=config.memory_fraction,
        memory_saver=config.saves_memory(recipe, service.device.type == "cuda"),
        weights_backup=config.backs_up_weights(recipe, service.device.type == "cuda"),
        quantization=config.quantization,
        extra=config.server_args,
    )
