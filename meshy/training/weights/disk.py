"""Weights by way of a file system that the replicas read too: one folder, loaded by each."""

import time
from pathlib import Path

from meshy.generation import commands
from meshy.training.weights.bracket import Bracket


async def load(bracket: Bracket, folder: Path, version: int) -> float:
    """Every living replica loads the folder; where requests end first, new ones wait meanwhile. Returns the seconds
    until generation was paused."""
    began = time.monotonic()
    if not bracket.drains:
        await bracket.pause()
    paused = time.monotonic()
    await bracket.all(commands.update_from_disk(folder, version, flush=bracket.flush))
    return paused - began
