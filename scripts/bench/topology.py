"""How long it takes to know a run: `derive_topology` for 16,384 GPUs, and `meshy check` as a process.

    python scripts/bench/topology.py

Bars: under 1 s each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from meshy.settings import load_recipe
from meshy.topology import derive_topology, gpu_list

RECIPE = "recipes/grpo_sync.py"
GPUS, HOSTS = 16384, 2048


def main() -> int:
    recipe = load_recipe(RECIPE, {}, GPUS)
    gpus = gpu_list(HOSTS, GPUS // HOSTS)
    began = time.perf_counter()
    topology = derive_topology(recipe, gpus)
    derived = time.perf_counter() - began
    digest = topology.digest
    digested = time.perf_counter() - began
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "meshy.cli", "check", RECIPE, "--gpus", "64", "--hosts", "8"],
        check=True,
        capture_output=True,
    )
    checked = time.perf_counter() - began
    print(
        f"derive_topology for {GPUS} GPUs: {derived:.3f} s ({digested:.3f} s with digest, {len(topology.processes)} "
        f"processes, digest {digest[:12]}); meshy check: {checked:.3f} s"
    )
    held = digested < 1 and checked < 1
    print(
        json.dumps({"derive_s": round(derived, 3), "with_digest_s": round(digested, 3), "check_s": round(checked, 3)})
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
