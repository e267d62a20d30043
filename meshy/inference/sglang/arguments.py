"""The command line and the environment of an SGLang server. Pure: everything that it depends on is passed in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshy.ignitor.children import without_torchrun
from meshy.inference.model_config import ModelConfig

VERSION = "0.5.23"

# SGLang answers prompts that are 6 tokens, and writes responses that end 2 tokens, short of its context length. Asked
# for so many more, it serves episodes of exactly the length that the recipe names.
CONTEXT_MARGIN = 6
CPU_CACHE_BYTES = 4 << 30  # of keys and values: on a CPU the cache shares the memory with everything else

# SGLang's arguments that Meshy sets itself, and what to set instead ("" where the run decides).
RESERVED = {
    "model_path": "the recipe's model", "tokenizer_path": "the recipe's model", "host": "", "port": "", "device": "",
    "dtype": "dtype", "tp_size": "tp", "ep_size": "ep", "dp_size": "dp", "nnodes": "gpus_per_replica", "node_rank": "",
    "dist_init_addr": "", "nccl_port": "the recipe's base_port", "context_length": "context_length",
    "max_running_requests": "max_running_requests", "weight_version": "", "random_seed": "the recipe's seed",
    "mem_fraction_static": "memory_fraction", "enable_memory_saver": "memory_saver", "quantization": "quantization",
    "skip_tokenizer_init": "", "config": "",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """One SGLang server process.

    python: the interpreter it runs in. rendezvous: host:port at which its ranks meet. node, nodes: this process among
    those of the replica, one on each host. weights_backup: weights that are released come back by themselves. extra:
    any other argument of SGLang, by its name with underscores.
    """

    python: Path
    model: ModelConfig
    host: str
    port: int
    rendezvous: str
    on_gpu: bool
    dtype: str
    context_length: int
    max_running_requests: int
    weight_version: int
    random_seed: int
    tp: int = 1
    ep: int = 1
    dp: int = 1
    node: int = 0
    nodes: int = 1
    threads: int = 1
    memory_fraction: float | None = None
    memory_saver: bool = False
    weights_backup: bool = False
    quantization: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def served_context(self) -> int:
        """SGLang's own context length, for which it serves `context_length`."""
        return self.context_length + CONTEXT_MARGIN


def server_command(plan: ServerPlan) -> list[str]:
    return [str(plan.python), "-m", "sglang.launch_server", *server_arguments(plan)]


def server_arguments(plan: ServerPlan) -> list[str]:
    """Every argument of `sglang.launch_server`."""
    values: dict[str, Any] = {
        "model_path": str(plan.model.folder),
        "host": plan.host,
        "port": plan.port,
        "device": "cuda" if plan.on_gpu else "cpu",
        "dtype": server_dtype(plan.dtype, plan.model.dtype, plan.on_gpu),
        "context_length": plan.served_context,
        "max_running_requests": plan.max_running_requests,
        "weight_version": plan.weight_version,
        "random_seed": plan.random_seed,
        "tp_size": plan.tp,
        "ep_size": plan.ep if plan.ep > 1 else None,
        "dp_size": plan.dp if plan.dp > 1 else None,
        "mem_fraction_static": plan.memory_fraction,
        "enable_memory_saver": plan.memory_saver,
        "enable_weights_cpu_backup": plan.weights_backup,
        "quantization": plan.quantization,
        "log_level_http": "warning",
        **_meeting_point(plan),
    }
    if not plan.on_gpu:
        values |= {"max_total_tokens": cpu_cache_tokens(plan), "sleep_on_idle": True}  # services share the cores
        values["sleep_on_idle"] = True  # it would keep a core busy that others could use
    return as_arguments({**values, **plan.extra})


def _meeting_point(plan: ServerPlan) -> dict[str, Any]:
    """Where the ranks of the replica meet: on a port of the run's own, which no other run on the host takes."""
    if plan.nodes > 1:
        return {"nnodes": plan.nodes, "node_rank": plan.node, "dist_init_addr": plan.rendezvous}
    if plan.dp > 1:
        return {}  # one meeting point for each of the dp engines, which only SGLang can choose: it holds them at once
    return {"nccl_port": int(plan.rendezvous.rpartition(":")[2])}


def as_arguments(values: Mapping[str, Any]) -> list[str]:
    """`{"tp_size": 2, "enable_x": True, "stop": None}` as `["--tp-size", "2", "--enable-x"]`.

    True is a bare flag, false and none are left out, a list gives several words, a mapping JSON.
    """
    words: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if isinstance(value, Mapping):
            words.append(json.dumps(dict(value)))
        elif isinstance(value, (list, tuple)):
            words += [str(member) for member in value]
        elif value is not True:
            words.append(str(value))
    return words


def server_dtype(chosen: str, of_model: str, on_gpu: bool) -> str:
    """`auto` keeps the model's own type, but for float32 on GPUs, where SGLang's kernels take half the bits."""
    if chosen != "auto":
        return chosen
    return "bfloat16" if on_gpu and of_model == "float32" else of_model


def cpu_cache_tokens(plan: ServerPlan) -> int:
    """Places in the cache for all that may run at once, within CPU_CACHE_BYTES, and for one whole episode at least."""
    wanted = plan.max_running_requests * plan.served_context
    fitting = CPU_CACHE_BYTES // plan.model.cache_bytes_per_token(4)
    return max(min(wanted, fitting), plan.served_context + 1)


def server_environment(plan: ServerPlan, environment: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """The service's own environment without what would mislead the server. scratch: where its sockets lie."""
    clean = without_torchrun(environment)
    clean.pop("MESHY_PARENT", None)
    clean |= {"TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}  # the model is a folder here
    if plan.context_length <= plan.model.context_length < plan.served_context:
        clean["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # the margin alone goes beyond what the model knows
    if not plan.on_gpu:
        clean |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(plan.threads)}
    return clean
