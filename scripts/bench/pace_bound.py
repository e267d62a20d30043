"""What each pace setting could reach at best, by pure simulation: see `pace/bound.py`.

    python scripts/bench/pace_bound.py [--batches 20] [--all]

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

from pace.bound import Outcome, simulate
from pace.lengths import lengths_of_run
from pace.settings import GROUP_SIZE, MEAN_LENGTH, NONE, PACES, SCALES, WINDOW_2, setting_of


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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="more settings")
    options = parser.parse_args()
    length = cache(lengths_of_run(options.seed, GROUP_SIZE, mean=MEAN_LENGTH))
    figures: dict[str, float] = {}
    for scale in SCALES:
        print(f"{scale}: {options.batches} batches, groups of {GROUP_SIZE}")
        outcomes: dict[str, Outcome] = {}
        for name, pace in {**PACES, **(variants() if options.all else {})}.items():
            outcomes[name] = simulate(setting_of(scale, pace, batches=options.batches), length)
            print(line(name, outcomes[name], outcomes["lock step"]))
        figures[str(scale)] = round(outcomes["lock step"].seconds / outcomes["none, streaming"].seconds, 2)
    print(json.dumps({"none_over_lock_step": figures}))
    return 0 if min(figures.values()) >= 2.0 else 1


if __name__ == "__main__":
    sys.exit(main())
