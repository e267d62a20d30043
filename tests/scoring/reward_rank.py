"""`python -m tests.scoring.reward_rank FOLDER RANK WORLD PORT`: one rank of reward models, which leaves the scores of
its samples, by their number, in `FOLDER/rewarded.<world>.<rank>.pt`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from meshy.scoring.reward_model import last_scores
from meshy.spmd.groups import Place, ProcessGroups
from meshy.titan.engine import EngineConfig, TitanEngine
from meshy.titan.micro_batch import Sample
from meshy.titan.sharing import cut_shares, spread
from tests.scoring.data import make_samples

PADDING = 0


def rows() -> list[Sample]:
    """Ragged ones, and some that end in what a model takes for padding."""
    samples = make_samples()
    for sample, count in zip(samples[4:7], (1, 3, 400), strict=True):
        sample.tokens[-count:] = PADDING
    return samples


def scored(engine: TitanEngine, rank: int, world: int, budget: int) -> dict[int, float]:
    samples = rows()
    lengths = [len(sample.tokens) for sample in samples]
    home = spread(dict(enumerate(lengths)), world)
    result: dict[int, float] = {}
    for members in cut_shares(range(len(samples)), home, lengths, world, budget, engine.config.packed)[rank]:
        scores = last_scores(engine, [samples[i] for i in members], PADDING)
        assert scores.dtype == torch.float32
        result |= dict(zip(members, scores.tolist(), strict=True))
    return result


def main(folder: str, rank: str, world: str, port: str) -> None:
    torch.set_num_threads(1)
    groups = ProcessGroups(Place(int(rank), int(world), "127.0.0.1", int(port)), collective_timeout=60)
    results = {}
    for model in ("qwen3", "qwen2"):
        for packed in (True, False):
            config = EngineConfig(
                model=Path(folder) / model, max_seq_len=64, packed=packed, optimizer=None, value_head=True
            )
            engine = TitanEngine(config)
            how = f"{model}, {'packed' if packed else 'padded'}"
            results[how] = scored(engine, int(rank), int(world), 10_000)
            results[f"{how}, few"] = scored(engine, int(rank), int(world), 60)
            results[f"{how}, one by one"] = scored(engine, int(rank), int(world), 1)
            engine.free()
            engine.restore()
            results[f"{how}, after a turn of somebody else"] = scored(engine, int(rank), int(world), 10_000)
    torch.save(results, Path(folder) / f"rewarded.{world}.{rank}.pt")
    dist.barrier()
    groups.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
