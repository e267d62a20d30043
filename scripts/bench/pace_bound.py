"""What each pace setting could reach at best, by pure simulation: see `pace/bound.py`.

    python scripts/bench/pace_bound.py [--batches 20] [--group-size 8] [--all]

An engine of 32 slots and batches of 128 samples, then 16 engines and 2048; response lengths log-normal (sigma 1, mean
200); a batch is trained in the time in which the full engines yield one. Times are in decode steps. Bar: window None
with streaming takes at most half the wall time of lock step. Exits with 1 if it is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import cache
from typing import Any

from pace.bound import Outcome, Setting, simulate
from pace.lengths import lengths_of_run

SLOTS, MEAN = 32, 200
SCALES = {"1 engine x 32, batch 128": (1, 128), "16 engines x 32, batch 2048": (16, 2048)}
LOCK_STEP: dict[str, Any] = {"window": 1}
WINDOW_2: dict[str, Any] = {"window": 2}
NONE: dict[str, Any] = {"window": None, "max_staleness": 8, "stream": True, "mini_batches": 4}
SETTINGS: dict[str, dict[str, Any]] = {"lock step": LOCK_STEP, "window 2": WINDOW_2, "none, streaming": NONE}


def setting_of(engines: int, batch_size: int, pace: dict[str, Any], **fields: Any) -> Setting:
    """The trainer takes a step's time for as many tokens as all slots write in a step."""
    shape = {"engines": engines, "slots": SLOTS, "batch_size": batch_size, "token_seconds": 1 / (engines * SLOTS)}
    return Setting(**{**shape, "max_in_flight_per_engine": SLOTS, **pace, **fields})


def variants() -> dict[str, dict[str, Any]]:
    """More settings, to see what matters."""
    found = {"window 2, streaming": WINDOW_2 | {"stream": True, "mini_batches": 4}, "window 3": {"window": 3}}
    found |= {"none, whole batches": NONE | {"stream": False}}
    for staleness in (1, 2, 4, 8, 16):
        for parts in (4, 16):
            name = f"none, max_staleness {staleness}, {parts} mini-batches"
            found[name] = NONE | {"max_staleness": staleness, "mini_batches": parts}
    return found


def line(name: str, outcome: Outcome, lock_step: Outcome) -> str:
    ages, dropped = outcome.ages, outcome.dropped / (outcome.setting.batches * outcome.setting.batch_size)
    return (
        f"  {name:<38} {outcome.seconds:9.0f} steps {lock_step.seconds / outcome.seconds:6.2f} x   busy: slots "
        f"{outcome.busy_slots:4.0%}, trainer {outcome.busy_trainer:4.0%}   age {sum(ages) / len(ages):5.2f} "
        f"(max {max(ages)})   dropped {dropped:5.2%}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="more settings")
    options = parser.parse_args()
    length = cache(lengths_of_run(options.seed, options.group_size, mean=MEAN))
    figures: dict[str, float] = {}
    for scale, (engines, batch_size) in SCALES.items():
        print(f"{scale}: {options.batches} batches, groups of {options.group_size}")
        outcomes: dict[str, Outcome] = {}
        for name, pace in {**SETTINGS, **(variants() if options.all else {})}.items():
            fields = {"batches": options.batches, "group_size": options.group_size}
            outcomes[name] = simulate(setting_of(engines, batch_size, pace, **fields), length)
            print(line(name, outcomes[name], outcomes["lock step"]))
        figures[scale] = round(outcomes["lock step"].seconds / outcomes["none, streaming"].seconds, 2)
    print(json.dumps({"none_over_lock_step": figures}))
    return 0 if min(figures.values()) >= 2.0 else 1


if __name__ == "__main__":
    sys.exit(main())
