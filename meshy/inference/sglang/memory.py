"""How a server gives up its memory and takes it again: the steps over its HTTP API, in their order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshy.generation import commands
from meshy.generation.commands import Command
from meshy.inference.parts import Parts

WEIGHTS, CACHE = "weights", "kv_cache"

Tell = Callable[[Command], Any]


def release(*tags: str) -> Command:
    return Command("/release_memory_occupation", {"tags": list(tags)})


def resume(*tags: str) -> Command:
    return Command("/resume_memory_occupation", {"tags": list(tags)})


def free(tell: Tell) -> Parts:
    """Requests in flight are retracted and wait, as those do that come."""
    parts = Parts()
    with parts.of("pause"):
        tell(commands.pause("retract"))
    with parts.of("release"):
        tell(release(CACHE, WEIGHTS))
    return parts


def restore(tell: Tell, folder: Path | None, version: int | None) -> Parts:
    """With the weights in that folder as that version, or as they were. The cache comes last: loading needs memory."""
    parts = Parts()
    with parts.of("resume weights"):
        tell(resume(WEIGHTS))
    if folder is not None and version is not None:
        with parts.of("load"):
            tell(commands.update_from_disk(folder, version))
    with parts.of("resume cache"):
        tell(resume(CACHE))
    with parts.of("continue"):
        tell(commands.CONTINUE)
    return parts
