"""What can be told to a replica besides generating: paths and bodies of SGLang's protocol. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(frozen=True)
class Command:
    """One request: `body` goes as JSON, unless it is None."""

    path: str
    body: Any = None
    method: str = "POST"


MODEL_INFO = Command("/model_info", method="GET")
SERVER_INFO = Command("/server_info", method="GET")
LOADS = Command("/v1/loads", method="GET")
HEALTH = Command("/health", method="GET")
CHECKSUM = Command("/weights_checker", {"action": "checksum"})
CONTINUE = Command("/continue_generation", {})
BEGIN_UPDATE = Command("/begin_weight_update", {})
END_UPDATE = Command("/end_weight_update", {})


def pause(mode: PauseMode) -> Command:
    return Command("/pause_generation", {"mode": mode})


def update_from_disk(path: str | Path, version: int, *, flush: bool = True) -> Command:
    """Load a model folder as weight `version`: at once when paused, else when the running requests have ended. flush:
    drop what is cached of the old weights, which is refused while requests hold it."""
    body = {"model_path": str(path), "weight_version": str(version), "flush_cache": flush, "abort_all_requests": False}
    return Command("/update_weights_from_disk", body)


def update_from_tensor(payloads: Sequence[str], version: int | None, *, flush: bool = True) -> Command:
    """Load tensors that lie in shared memory, within an update. payloads: one for each rank of the replica.
    version: with the last tensors of an update. flush: drop then what is cached of the old weights."""
    body = {"serialized_named_tensors": list(payloads), **_closing(version, flush)}
    return Command("/update_weights_from_tensor", body)


def join_group(host: str, port: int, *, first_rank: int, world_size: int, group: str, backend: str) -> Command:
    """Join the process group over which weights are broadcast; the replica's ranks count from `first_rank`."""
    body = {
        "master_address": host,
        "master_port": port,
        "rank_offset": first_rank,
        "world_size": world_size,
        "group_name": group,
        "backend": backend,
    }
    return Command("/init_weights_update_group", body)


def leave_group(group: str) -> Command:
    return Command("/destroy_weights_update_group", {"group_name": group})


def update_from_broadcast(
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    group: str,
    version: int | None,
    *,
    packed: bool,
    flush: bool = True,
) -> Command:
    """Take part in a broadcast of each of these tensors, and load them. packed: in one broadcast of uint8 instead, of
    their bytes one after another. version, flush: as for `update_from_tensor`."""
    body = {
        "names": list(names),
        "dtypes": list(dtypes),
        "shapes": [list(shape) for shape in shapes],
        "group_name": group,
        "load_format": "flattened_bucket" if packed else None,
        **_closing(version, flush),
    }
    return Command("/update_weights_from_distributed", body)


def set_version(version: int) -> Command:
    """Say that the weights are of another version; what is in flight is aborted."""
    return Command("/update_weight_version", {"new_version": str(version), "abort_all_requests": True})


def _closing(version: int | None, flush: bool) -> dict[str, Any]:
    return {"flush_cache": False} if version is None else {"flush_cache": flush, "weight_version": str(version)}
