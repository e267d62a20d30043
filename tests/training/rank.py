"""`python -m tests.training.rank FOLDER RANK WORLD PORT`: one rank of a small trainer; rank 0 saves the results."""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshy.algorithms.correction import Correction
from meshy.algorithms.interface import LossConfig
from meshy.algorithms.losses.ppo_clip import ppo_clip_loss
from meshy.spmd.groups import Place, ProcessGroups
from meshy.titan.engine import AdamW, EngineConfig, TitanEngine
from meshy.titan.micro_batch import Sample, pack, pad
from meshy.training.learner import Learner
from meshy.training.plan import plan_mini_batch
from meshy.training.weights.folder import write_weights
from tests.training.data import make_samples

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
TEMPERATURE = 0.8
VERSION = 5  # of the weights; some tokens were written by 4 and 3
CORRECTIONS = {
    "rollout": Correction(veto=0.2, reject="seq_mean_k3", reject_high=0.2, opsm=0.05),
    "recompute": Correction(importance="token", low=0.5, high=1.5, action="mask"),
    "loglinear": Correction(importance="geometric", low=0.7, reject="token_k2", reject_high=0.1),
}
"""One for each source of old log-probs, each with bounds that bind for some of `make_samples` only."""


def with_column(sample: Sample, name: str, values: torch.Tensor) -> Sample:
    return replace(sample, columns={**sample.columns, name: values})


def without_advantage(sample: Sample) -> Sample:
    return with_column(sample, "advantages", torch.zeros(len(sample.tokens)))


class Rank:
    def __init__(self, folder: Path, groups: ProcessGroups) -> None:
        self.folder, self.groups = folder, groups

    def learner(self, model: str = "qwen3_tied", aggregation: str = "token-mean", **engine):
        config = EngineConfig(model=self.folder / model, max_seq_len=64, **engine)
        return Learner(
            engine=TitanEngine(config),
            groups=self.groups,
            loss=ppo_clip_loss,
            loss_config=LossConfig(aggregation=aggregation),
            temperature=TEMPERATURE,
            micro_batch_tokens=0,
        )

    def plan(
        self, samples: dict[int, Sample], budget: int, packed: bool, without_gradient: set[int], scored_of: int = 1
    ):
        return plan_mini_batch(
            sorted(samples),
            [len(samples[i].tokens) for i in sorted(samples)],
            [int(samples[i].loss_mask.sum()) for i in sorted(samples)],
            world_size=self.groups.place.world_size,
            tokens_per_micro_batch=budget,
            packed=packed,
            without_gradient=without_gradient,
            scored_of=scored_of,
        )

    def gradient(
        self,
        learner: Learner,
        samples: dict[int, Sample],
        budget: int,
        without_gradient: set[int] = frozenset(),
        scored_of: int = 1,
    ) -> dict:
        learner.engine.optimizers.zero_grad()
        plan = self.plan(samples, budget, learner.engine.config.packed, without_gradient, scored_of)
        sums = learner.accumulate(learner.prepare(samples, [plan], VERSION), plan)
        parameters = learner.engine.model.named_parameters()
        named = [(name.replace("_checkpoint_wrapped_module.", ""), p) for name, p in parameters]
        gradient = {name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in named}
        return {"micro_batches": len(plan.trained[0]), "sums": sums, "gradient": gradient}

    def gradients(self) -> dict:
        """The same batch in every way of cutting it."""
        samples = make_samples()
        results = {}
        for packed in (False, True):
            learner = self.learner(packed=packed)
            for budget in (1, 60, 100, 10_000):
                results[f"{'packed' if packed else 'padded'} {budget}"] = self.gradient(learner, samples, budget)
        for aggregation in AGGREGATIONS[1:]:
            learner = self.learner(aggregation=aggregation)
            for budget in (1, 10_000):
                results[f"{aggregation} {budget}"] = self.gradient(learner, samples, budget)
        for name in ("full", "selective"):
            results[f"checkpointing {name}"] = self.gradient(self.learner(activation_checkpointing=name), samples, 60)
        results["bf16"] = self.gradient(self.learner(mixed_precision="bfloat16"), samples, 60)
        results["bf16 file"] = self.gradient(self.learner("qwen3_bf16"), samples, 60)
        for idle in ({0, 3, 5, 7, 8}, set(samples)):
            zeroed = {i: without_advantage(s) if i in idle else s for i, s in samples.items()}
            name = "all" if idle == set(samples) else "some"
            results[f"{name} without advantage"] = self.gradient(self.learner(), zeroed, 60)
            results[f"{name} only scored"] = self.gradient(self.learner(), zeroed, 60, idle)
            if name == "some":
                results["some resting"] = self.gradient(self.learner(), zeroed, 60, idle, scored_of=2)
                busy = dict(enumerate(s for i, s in samples.items() if i not in idle))
                results["trained alone"] = self.gradient(self.learner(), busy, 60)
                seen = dict(enumerate(zeroed[i] for i in sorted(idle)[::2]))
                results["scored alone"] = self.gradient(self.learner(), seen, 60, set(seen))
                idle_samples = [zeroed[i] for i in idle]
                counts = [sum(int(s.loss_mask.sum()) for s in some) for some in (idle_samples, seen.values())]
                results["weight"] = counts[0] / counts[1]
        masked = {i: Sample(s.tokens, torch.zeros_like(s.loss_mask), s.columns) for i, s in samples.items()}
        results["all masked"] = self.gradient(learner, masked, 60)
        results["one sample"] = self.gradient(self.learner(), {0: samples[0]}, 60)
        return results

    def corrected(self) -> dict:
        """The same for each correction, and with samples that are only scored."""
        samples, idle = make_samples(), {0, 3, 5, 7, 8}
        zeroed = {i: without_advantage(s) if i in idle else s for i, s in samples.items()}
        padded, packed = self.learner(), self.learner(packed=True)
        results = {}
        for old, correction in CORRECTIONS.items():
            learner = replace(padded, old_logprobs=old, correction=correction)
            for budget in (1, 60, 10_000):
                results[f"{old} {budget}"] = self.gradient(learner, samples, budget)
            results[f"{old} packed"] = self.gradient(replace(learner, engine=packed.engine), samples, 100)
            results[f"{old} without advantage"] = self.gradient(learner, zeroed, 60)
            results[f"{old} only scored"] = self.gradient(learner, zeroed, 60, idle)
        fresh = {i: with_column(s, "token_versions", torch.full((len(s.tokens),), VERSION)) for i, s in samples.items()}
        results["loglinear on policy"] = self.gradient(replace(padded, old_logprobs="loglinear"), fresh, 60)
        everything = Correction(veto=0.999)
        results["all dropped"] = self.gradient(replace(padded, correction=everything), samples, 60)
        return results

    def training(self) -> dict:
        """Three batches, with two mini-batches and two epochs each; then the weights."""
        learner = replace(
            self.learner(optimizer=AdamW(weight_decay=0.1, max_grad_norm=0.5)),
            old_logprobs="recompute",
            correction=Correction(importance="token", high=1.2),
        )
        reports = []
        for seed in range(3):
            samples = make_samples(seed=seed)
            halves = [{i: samples[i] for i in samples if i % 2 == half} for half in (0, 1)]
            plans = []
            lengths = [len(samples[i].tokens) for i in sorted(samples)]
            written = [int(samples[i].loss_mask.sum()) for i in sorted(samples)]
            for half in halves:
                plans.append(
                    plan_mini_batch(
                        sorted(half),
                        lengths,
                        written,
                        world_size=self.groups.place.world_size,
                        tokens_per_micro_batch=60,
                        packed=False,
                    )
                )
            reports.append(learner.train(samples, plans, epochs=2, learning_rates=[1e-3] * 4))
        weights = dict(learner.engine.hf_tensors())
        return {"reports": reports, "weights": weights}

    @torch.no_grad()
    def logits(self) -> dict:
        """Of every model, padded and packed, at the masked positions; and its export."""
        results = {}
        samples = list(make_samples().values())
        for model in ("qwen3_tied", "qwen3", "qwen2_tied", "qwen2"):
            engine = self.learner(model).engine
            results[model] = {
                "padded": engine.logits(pad(samples)),
                "packed": engine.logits(pack(samples)),
                "packed with padding": engine.logits(pack(samples, multiple=128)),
            }
            write_weights(self.folder / "export" / model, engine.hf_tensors(), self.folder / model)
        return results


def main(folder: str, rank: str, world: str, port: str) -> None:
    torch.set_num_threads(1)
    groups = ProcessGroups(Place(int(rank), int(world), "127.0.0.1", int(port)), collective_timeout=60)
    work = Rank(Path(folder), groups)
    results = {"gradients": work.gradients(), "corrected": work.corrected(), "training": work.training()}
    if world == "1":
        results["logits"] = work.logits()
    if rank == "0":
        torch.save(results, Path(folder) / f"world{world}.pt")
    dist.barrier()
    groups.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
