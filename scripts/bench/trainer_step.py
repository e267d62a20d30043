"""Seconds of one optimiser step of the demo model: 128 rows of 20-110 tokens, one thread a rank, nothing around it.

    python scripts/bench/trainer_step.py [--ranks 1 2] [--repeat 3]

Prints the best of `repeat` steps for padded and packed rows and several micro-batch budgets.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAYOUTS = (("padded", 512), ("padded", 1024), ("padded", 4096), ("packed", 512), ("packed", 1024), ("packed", 4096))


def run_rank(rank: int, world: int, port: int, repeat: int) -> None:
    import torch

    from meshy.algorithms.interface import LossConfig
    from meshy.algorithms.losses.ppo_clip import ppo_clip_loss
    from meshy.spmd.groups import Place, ProcessGroups
    from meshy.titan.engine import EngineConfig, TitanEngine
    from meshy.titan.micro_batch import Sample
    from meshy.training.learner import Learner
    from meshy.training.plan import plan_mini_batch

    groups = ProcessGroups(Place(rank, world, "127.0.0.1", port))
    g = torch.Generator().manual_seed(0)
    samples = {}
    for number in range(128):
        length = int(torch.randint(20, 111, (1,), generator=g))
        samples[number] = Sample(
            tokens=torch.randint(0, 200, (length,), generator=g),
            loss_mask=torch.arange(length) >= 12,
            columns={"advantages": torch.randn(length, generator=g), "rollout_logprobs": torch.full((length,), -5.0)},
        )
    lengths = [len(sample.tokens) for sample in samples.values()]
    for layout, budget in LAYOUTS:
        engine = TitanEngine(
            EngineConfig(model=ROOT / "recipes" / "demo_model", max_seq_len=128, packed=layout == "packed")
        )
        learner = Learner(
            engine=engine,
            groups=groups,
            loss=ppo_clip_loss,
            loss_config=LossConfig(),
            temperature=1.0,
            micro_batch_tokens=budget,
        )
        plan = plan_mini_batch(
            range(128),
            lengths,
            [length - 12 for length in lengths],
            world_size=world,
            tokens_per_micro_batch=budget,
            packed=layout == "packed",
        )
        seconds = []
        for _ in range(repeat):
            started = time.perf_counter()
            learner.train(samples, [plan], epochs=1, learning_rates=[1e-5])
            seconds.append(time.perf_counter() - started)
        if rank == 0:
            rate = sum(lengths) / min(seconds)
            print(
                f"{world} rank(s)  {layout:6}  budget {budget:5}  {len(plan.trained[0]):2} micro-batches  "
                f"{min(seconds):.3f} s  {rate:7.0f} tokens/s",
                flush=True,
            )
    groups.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rank", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank, world, port = options.rank
        run_rank(rank, world, port, options.repeat)
        return
    from meshy.queue.local import free_ports

    for world in options.ranks:
        (port,) = free_ports(1)
        command = [sys.executable, __file__, "--repeat", str(options.repeat), "--rank"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MESHY_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
        ranks = [
            subprocess.Popen([*command, str(rank), str(world), str(port)], env=environment) for rank in range(world)
        ]
        for process in ranks:
            if process.wait():
                sys.exit(f"a rank ended with exit code {process.returncode}")


if __name__ == "__main__":
    main()
