"""Weights by way of a file system that the replicas read too: one folder, loaded by each."""

import time
from pathlib import Path

from meshy.generation import commands
from meshy.training.weights.bracket import Bracket
from meshy.training.weights.choice import InFlight


async def load(bracket: Bracket, folder: Path, version: int, in_flight: InFlight) -> float:
    """Every living replica loads the folder. in_flight: see Publisher; where requests end first, new ones wait
    meanwhile. Returns the seconds until generation was paused."""
    began = time.monotonic()
    if in_flight != "drain":
        await bracket.pause(in_flight)
    paused = time.monotonic()
    await bracket.all(commands.update_from_disk(folder, version))
    return paused - began
