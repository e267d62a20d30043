"""What hand-offs cost, from the traces of the test roles."""

from __future__ import annotations

import json
from pathlib import Path

Event = tuple[float, str, str]


def events(run_dir: Path) -> list[Event]:
    """(seconds, replica, event) of all roles, in order."""
    found = []
    for file in run_dir.glob("trace-*.jsonl"):
        for line in file.read_text().splitlines():
            told = json.loads(line)
            found.append((told["at"], file.stem.removeprefix("trace-"), told["event"]))
    return sorted(found)


def hand_offs(run_dir: Path) -> list[float]:
    """Seconds from when an ON_DEMAND role could have had the GPUs until its restore began: since it asked, or the
    holder had freed them, whichever was later; where the FALLBACK role held them, what passed before it began to free
    counts too, but not its freeing."""
    costs = []
    wants: dict[str, float] = {}
    freeing: tuple[str, float, float] | None = None  # who, when it began to free, when it had
    began: dict[str, float] = {}
    entered: dict[str, float] = {}
    for at, who, event in events(run_dir):
        if event == "want":
            wants[who] = at
        elif event == "enter":
            entered[who] = at
        elif event == "free":
            began[who] = at
        elif event == "freed":
            freeing = (who, began[who], at)
        elif event == "restore" and not who.startswith("idle") and freeing is not None and who in wants:
            holder, from_, freed = freeing
            cost = at - max(freed, wants[who])
            if holder.startswith("idle") and wants[who] < from_:
                cost += from_ - max(wants[who], entered.get(holder, 0.0))
            costs.append(cost)
            del wants[who]
    return costs
