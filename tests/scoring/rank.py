"""`python -m tests.scoring.rank FOLDER RANK WORLD PORT`: one rank of frozen models and value heads; rank 0 leaves what
they said in `FOLDER/scored.<world>.pt`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshy.scoring.likelihood import likelihoods
from meshy.scoring.service import by_row
from meshy.spmd.groups import Place, ProcessGroups
from meshy.titan.engine import EngineConfig, TitanEngine
from meshy.titan.micro_batch import Sample, pack, pad
from meshy.titan.sharing import cut_shares, spread
from tests.scoring.data import CANDIDATES, TEMPERATURE, K, make_samples

ALL = ("sampled", "candidates", "topk", "vocabulary")


class Rank:
    def __init__(self, folder: Path, groups: ProcessGroups) -> None:
        self.folder, self.rank, self.world = folder, groups.place.rank, groups.place.world_size

    def engine(self, model: str, **options) -> TitanEngine:
        return TitanEngine(EngineConfig(model=self.folder / model, max_seq_len=64, optimizer=None, **options))

    def scored(self, engine: TitanEngine, budget: int, part: int, scores=ALL) -> dict[int, list[Tensor]]:
        """Every sample's columns, of the samples that this rank has."""
        samples = make_samples()
        lengths = [len(sample.tokens) for sample in samples]
        home = spread(dict(enumerate(lengths)), self.world)
        result = {}
        for members in cut_shares(range(len(samples)), home, lengths, self.world, budget, engine.config.packed)[
            self.rank
        ]:
            mine = [samples[i] for i in members]
            batch = (pack if engine.config.packed else pad)(mine, [CANDIDATES], 4)
            reduce = likelihoods(
                scores, targets=batch.targets, candidates=batch.columns[CANDIDATES].long(), k=K, temperature=TEMPERATURE
            )
            columns = [by_row(part_, mine) for part_ in engine.reduced(batch, reduce, part)]
            result |= {i: [column[n] for column in columns] for n, i in enumerate(members)}
        return result

    def values(self, engine: TitanEngine) -> list[Tensor]:
        samples: list[Sample] = make_samples()
        with torch.no_grad():
            return by_row(engine.logits(pad(samples)).squeeze(1), samples)

    def everything(self) -> dict:
        packed, padded = self.engine("qwen3_tied", packed=True), self.engine("qwen3_tied")
        results = {
            "padded": self.scored(padded, 10_000, 10_000),
            "packed": self.scored(packed, 10_000, 10_000),
            "packed, few": self.scored(packed, 60, 10_000),
            "packed, one by one": self.scored(packed, 1, 10_000),
            "in parts": self.scored(packed, 10_000, 7),
            "in parts of four": self.scored(padded, 60, 4),
            "untied": self.scored(self.engine("qwen3", packed=True), 100, 16),
            "frozen": [p.requires_grad for p in packed.model.parameters()],
            "new head": self.values(self.engine("qwen3_tied", value_head=True)),
            "classifier": self.values(self.engine("classifier", value_head=True)),
        }
        packed.free()
        packed.restore()
        results["after a turn of somebody else"] = self.scored(packed, 10_000, 10_000)
        return results


def main(folder: str, rank: str, world: str, port: str) -> None:
    torch.set_num_threads(1)
    groups = ProcessGroups(Place(int(rank), int(world), "127.0.0.1", int(port)), collective_timeout=60)
    results = Rank(Path(folder), groups).everything()
    torch.save(results, Path(folder) / f"scored.{world}.{rank}.pt")
    dist.barrier()
    groups.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
