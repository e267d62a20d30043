"""`python -m tests.training.parking_rank FOLDER RANK WORLD PORT`: one rank whose trainer leaves the device and comes
back; every rank saves what it saw."""

import sys
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshy.spmd.groups import Place, ProcessGroups
from meshy.titan.engine import AdamW
from meshy.titan.micro_batch import pad
from meshy.titan.parked import give_back
from meshy.training.weights.folder import write_weights
from tests.training.data import make_samples
from tests.training.rank import Rank

STEPS = 4


class Parked(Rank):
    def trained(self, parked: bool) -> dict:
        """Losses and this rank's weights and optimiser state after some steps; parked: free and restore before each
        step, twice before the first, after a forward pass alone, when the weights have been written, and with gradients
        that are not applied yet."""
        learner = self.learner(optimizer=AdamW(weight_decay=0.1, max_grad_norm=0.5))
        reports = []

        def away(times: int = 1) -> None:
            for _ in range(times if parked else 0):
                learner.engine.free()
                learner.engine.free()  # a second one changes nothing
                learner.engine.restore()

        away(2)
        for seed in range(STEPS):
            samples = make_samples(seed=seed)
            plan = self.plan(samples, 60, packed=False, without_gradient=set())
            with torch.no_grad():
                reports.append({"scored": float(self.scored(learner, samples))})
            away()
            reports.append(learner.train(samples, [plan], epochs=1, learning_rates=[1e-3]))
            written = self.folder / f"written{dist.get_world_size()}.{dist.get_rank()}"
            write_weights(written, learner.engine.hf_tensors(), self.folder / "qwen3_tied")
            away()
        learner.accumulate(samples, plan)
        away()
        learner.engine.step(1e-3)
        away()
        return {"reports": reports, **self.local_state(learner)}

    def scored(self, learner, samples) -> torch.Tensor:
        """Of a forward pass alone, after which FSDP may keep gathered parameters."""
        return learner.engine.logits(pad([samples[0]])).sum()

    def local_state(self, learner) -> dict:
        engine = learner.engine
        weights = {name: local(value).clone() for name, value in engine.model.named_parameters()}
        moments = [
            local(value).clone()
            for optimizer in engine.optimizers
            for state in optimizer.state.values()
            for value in state.values()
        ]
        return {"weights": weights, "moments": moments}

    def memory(self) -> dict:
        """Bytes of a large model's parameters and optimiser state here, and PSS with them, without, and with again."""
        learner = self.learner("large")
        samples = make_samples(count=2)
        plan = self.plan(samples, 60, packed=False, without_gradient=set())
        fresh = self.away(learner)
        learner.train(samples, [plan], epochs=1, learning_rates=[1e-3])
        with torch.no_grad():
            self.scored(learner, samples)
        return {"before the first step": fresh, "later": self.away(learner)}

    def away(self, learner) -> dict:
        give_back(torch.device("cpu"))
        told = {"with": pss()}
        learner.engine.free()
        told["without"] = pss()
        learner.engine.restore()
        told["again"] = pss()
        state = self.local_state(learner)
        return {**told, "held": sum(tensor.nbytes for tensor in [*state["weights"].values(), *state["moments"]])}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def pss() -> int:
    return psutil.Process().memory_full_info().pss


def main(folder: str, rank: str, world: str, port: str) -> None:
    torch.set_num_threads(1)
    groups = ProcessGroups(Place(int(rank), int(world), "127.0.0.1", int(port)), collective_timeout=60)
    work = Parked(Path(folder), groups)
    results = {"stayed": work.trained(False), "went": work.trained(True), "memory": work.memory()}
    torch.save(results, Path(folder) / f"parking{world}.{rank}.pt")
    dist.barrier()
    groups.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
