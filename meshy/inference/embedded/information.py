"""What the server says about itself, with SGLang's keys."""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime
from typing import Any

from meshy.generation.checksum import combined_checksum
from meshy.generation.layout import EMBEDDED
from meshy.inference.embedded.engine import Engine, Occupancy


def model_info(engine: Engine, model_path: str, tokenizer_path: str) -> dict[str, Any]:
    config = engine.runner.model.config
    return {
        "model_path": model_path,
        "served_model_name": tokenizer_path,
        "tokenizer_path": tokenizer_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": engine.weight_version,
        "load_format": "auto",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": config.model_type,
        "architectures": config.architectures,
    }


def server_info(engine: Engine, model_path: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments it was started with, what became of them, and counters since then."""
    counters, cache = engine.counters, engine.runner.cache
    return {
        **arguments,
        "model_path": model_path,
        "weight_version": engine.weight_version,
        "context_length": engine.runner.context_length,
        "max_running_requests": engine.scheduler.max_running,
        "max_total_num_tokens": cache.capacity,
        "tp_size": 1,
        "dp_size": 1,
        "status": "ready" if engine.failure is None else "failed",
        "version": EMBEDDED,
        "internal_states": [
            {
                "generated_tokens": counters.generated_tokens,
                "finished_requests": counters.finished_requests,
                "busy_seconds": counters.busy_seconds,
                "steps": counters.steps,
            }
        ],
    }


def models(engine: Engine, model_path: str) -> dict[str, Any]:
    model = {
        "id": model_path,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "meshy",
        "root": model_path,
        "parent": None,
        "max_model_len": engine.runner.context_length,
    }
    return {"object": "list", "data": [model]}


def loads(engine: Engine, occupancy: Occupancy) -> dict[str, Any]:
    now, runner, counters = time.time(), engine.runner, engine.counters
    capacity = runner.cache.capacity
    load = {
        "timestamp": now,
        "dp_rank": 0,
        "num_running_reqs": occupancy.running,
        "num_waiting_reqs": occupancy.waiting,
        "num_waiting_uncached_tokens": 0,
        "num_used_tokens": occupancy.used_tokens,
        "num_total_tokens": occupancy.used_tokens,
        "num_active_tokens": occupancy.used_tokens,
        "max_total_num_tokens": capacity,
        "max_running_requests": engine.scheduler.max_running,
        "token_usage": occupancy.used_tokens / capacity,
        "gen_throughput": counters.generated_tokens / counters.busy_seconds if counters.busy_seconds else 0.0,
        "cache_hit_rate": 0.0,
        "utilization": occupancy.running / engine.scheduler.max_running,
        "memory": {
            "weight_gb": runner.weights.bytes / 2**30,
            "kv_cache_gb": runner.cache.bytes / 2**30,
            "graph_gb": 0.0,
            "token_capacity": capacity,
        },
        "queues": {
            "waiting": occupancy.waiting,
            "grammar": 0,
            "paused": occupancy.held,
            "retracted": 0,
            "prealloc_ready": 0,
        },
    }
    return {
        "timestamp": datetime.fromtimestamp(now, UTC).isoformat(),
        "version": EMBEDDED,
        "accelerator": None,
        "num_accelerators": 1,
        "loads": [load],
    }


def weights_check(sums: dict[str, str]) -> dict[str, Any]:
    """The answer of `/weights_checker` for the checksums of a server that is one rank."""
    one = ("tp", "dp", "pp")
    place = {f"{kind}_rank": 0 for kind in one} | {f"{kind}_size": 1 for kind in one} | {"rank": 0, "size": 1}
    of_rank = combined_checksum(sums)
    rank = {"checksums": sums, "per_gpu_checksum": of_rank, "parallelism_info": [{"role": "target", **place}]}
    of_engine = hashlib.sha256(of_rank.encode()).hexdigest()
    return {"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": of_engine}
