"""What is simulated and measured: paces, and the engines and batches that they are tried on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .bound import Setting

SLOTS = 32  # of an engine
GROUP_SIZE = 8
MEAN_LENGTH = 200.0  # tokens

LOCK_STEP: dict[str, Any] = {"window": 1}
WINDOW_2: dict[str, Any] = {"window": 2, "batches_in_flight": 1.5}  # as much as it needs: more makes it no faster
# Three batches alive at most, so that gates and credits pace it all the time.
NONE: dict[str, Any] = {"window": None, "max_staleness": 2, "stream": True, "mini_batches": 4}
PACES: dict[str, dict[str, Any]] = {"lock step": LOCK_STEP, "window 2": WINDOW_2, "none, streaming": NONE}


@dataclass(frozen=True)
class Scale:
    engines: int
    batch_size: int

    def __str__(self) -> str:
        return f"{self.engines} x {SLOTS}, batch {self.batch_size}"


SCALES = (Scale(1, 128), Scale(16, 2048))


def setting_of(
    scale: Scale, pace: dict[str, Any], *, batches: int, step_seconds: float = 1.0, **fields: Any
) -> Setting:
    """The trainer takes a step's time for as many tokens as all slots write in a step."""
    if batches_in_flight := pace.get("batches_in_flight"):
        fields["max_in_flight"] = int(batches_in_flight * scale.batch_size)
    shape = {"engines": scale.engines, "slots": SLOTS, "batch_size": scale.batch_size, "group_size": GROUP_SIZE}
    known = {name: value for name, value in pace.items() if name != "batches_in_flight"}
    times = {"step_seconds": step_seconds, "token_seconds": step_seconds / (scale.engines * SLOTS)}
    return Setting(**{**shape, **times, "batches": batches, "max_in_flight_per_engine": SLOTS, **known, **fields})
