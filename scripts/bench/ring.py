"""What passing a ring's token on costs, beyond freeing and restoring, and what an idle ring costs the queue.

    python scripts/bench/ring.py [--turns 60] [--workers 2]

  after a hold of 0, 0.5 and 2 s   from when a role could have had the GPUs (it asked; they were free) until its restore
                                   begins                                     p50 at most 15 ms, p99 at most 100 ms
  idle                             CPU of the queue's controller              at most 1 % of a core

Roles that count and sleep, in processes of their own, over the real queue; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.colocation.traces import hand_offs  # noqa: E402
from tests.launch import launched  # noqa: E402

ROLES = "tests/colocation/roles.py"
HOLDS = (0.0, 0.5, 2.0)
IDLE_SECONDS = 10.0


def costs(hold: float, turns: int, workers: int) -> dict[str, float]:
    """Milliseconds of the hand-offs of a run in which every turn lasts `hold` seconds."""
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        with launched(run_dir, f"turns={turns}", f"hold={hold}", f"workers={workers}", recipe=ROLES) as run:
            if run.wait(600) != 0:
                raise RuntimeError(run.output)
        taken = sorted(1e3 * seconds for seconds in hand_offs(run_dir))
    cuts = statistics.quantiles(taken, n=100)
    return {"hand_offs": len(taken), "p50_ms": round(cuts[49], 2), "p99_ms": round(cuts[98], 2)}


def idle() -> float:
    """Share of a core that the queue's processes use while nobody asks."""
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        with launched(run_dir, "turns=2", "pause=3600", recipe=ROLES) as run:
            run.wait_for_line("all services ready", 60)
            time.sleep(3)  # until the last of them holds
            queue = [p for p in run.processes() if "meshy.queue.server" in " ".join(p.cmdline())]
            before = sum(sum(p.cpu_times()[:2]) for p in queue)
            time.sleep(IDLE_SECONDS)
            return (sum(sum(p.cpu_times()[:2]) for p in queue) - before) / IDLE_SECONDS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=60, help="of each role, where turns are short")
    parser.add_argument("--workers", type=int, default=2, help="ON_DEMAND roles beside the FALLBACK one")
    options = parser.parse_args()
    result: dict[str, float] = {}
    missed = []
    for hold in HOLDS:
        turns = options.turns if hold < 1 else max(8, options.turns // 4)
        for name, value in costs(hold, turns, options.workers).items():
            result[f"hold {hold:g} s/{name}"] = value
        for name, bar in (("p50_ms", 15.0), ("p99_ms", 100.0)):
            if (value := result[f"hold {hold:g} s/{name}"]) > bar:
                missed.append(f"after a hold of {hold:g} s, {name} is {value}, at most {bar}")
    result["idle/queue_cores"] = round(idle(), 4)
    if result["idle/queue_cores"] > 0.01:
        missed.append(f"an idle ring costs the queue {100 * result['idle/queue_cores']:.1f} % of a core, at most 1 %")
    for line in missed:
        print(line, file=sys.stderr)
    print(json.dumps(result))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
