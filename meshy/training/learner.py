"""One rank's part in training: micro-batches through the engine and the loss, numbers summed over all ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshy.algorithms.interface import GlobalCounts, LossConfig, LossInputs, LossOutput
from meshy.algorithms.kl import kl_estimate
from meshy.algorithms.logprobs import token_logprobs
from meshy.spmd.groups import ProcessGroups
from meshy.training.micro_batch import MicroBatch, Sample, pack, pad
from meshy.training.plan import MicroBatchPlan, MiniBatchPlan
from meshy.training.titan.engine import TitanEngine

ADVANTAGES, ROLLOUT_LOGPROBS, OLD_LOGPROBS = "advantages", "rollout_logprobs", "old_logprobs"
Loss = Callable[[LossInputs, LossConfig], LossOutput]


@dataclass(frozen=True, kw_only=True)
class Learner:
    """temperature: of sampling; logits are divided by it before log-probs are taken. micro_batch_tokens: what a plan
    may put into one forward pass. columns: per-token columns that samples carry beside advantages and rollout
    log-probs, handed on to the loss."""

    engine: TitanEngine
    groups: ProcessGroups
    loss: Loss
    loss_config: LossConfig
    temperature: float
    micro_batch_tokens: int
    recompute_old: bool = False
    columns: tuple[str, ...] = ()

    @property
    def column_names(self) -> tuple[str, ...]:
        old = (OLD_LOGPROBS,) if self.recompute_old else ()
        return (ADVANTAGES, ROLLOUT_LOGPROBS, *old, *self.columns)

    def train(
        self,
        samples: Mapping[int, Sample],
        plans: Sequence[MiniBatchPlan],
        epochs: int,
        learning_rates: Sequence[float],
    ) -> dict[str, float]:
        """One optimiser step for each plan, `epochs` times over. samples: this rank's, by their number in the plans.
        learning_rates: one for each step.

        Returns means over all ranks: `loss` and `grad_norm` over the steps, what the loss reports per token, `entropy`
        (nats), and, of the first step only, whose rows are fresh, `mismatch_kl` (k3 of rollout against trainer) and
        `logprob_diff_mean` (mean |trainer - rollout|). `lr` is the last one.
        """
        if self.recompute_old:
            samples = self._with_old_logprobs(samples, plans)
        steps: list[dict[str, float]] = []
        rates = iter(learning_rates)
        for _ in range(epochs):
            for plan in plans:
                steps.append(self._optimiser_step(samples, plan, next(rates)))
        fresh = {name: steps[0][name] for name in ("mismatch_kl", "logprob_diff_mean")}
        means = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
        return {**means, **fresh, "lr": learning_rates[len(steps) - 1]}

    def _optimiser_step(self, samples: Mapping[int, Sample], plan: MiniBatchPlan, lr: float) -> dict[str, float]:
        sums = self.accumulate(samples, plan)
        norm = self.engine.step(lr)
        per_token = {name: value / max(plan.tokens, 1) for name, value in sums.items() if name != "loss"}
        return {"loss": sums["loss"], "grad_norm": norm, **per_token}

    def accumulate(self, samples: Mapping[int, Sample], plan: MiniBatchPlan) -> dict[str, float]:
        """Forward and backward over the mini-batch: adds to the gradients, and returns `loss` and token sums, both
        over all ranks."""
        counts = GlobalCounts(tokens=plan.tokens, sequences=plan.sequences)
        totals: dict[str, Tensor] = {}
        rank = self.groups.place.rank
        work = [(members, False) for members in plan.scored[rank]] + [(members, True) for members in plan.trained[rank]]
        for members, with_gradient in work:
            with torch.set_grad_enabled(with_gradient):
                said = self._micro_step(self._batch(samples, members), counts)
            for name, value in said.items():
                totals[name] = totals[name] + value if name in totals else value
        names = sorted(totals)
        summed = self.groups.sum(torch.stack([totals[name].double() for name in names]).cpu())
        return dict(zip(names, summed.tolist(), strict=True))

    def _micro_step(self, batch: MicroBatch, counts: GlobalCounts) -> dict[str, Tensor]:
        logprobs, entropy = token_logprobs(self.engine.logits(batch), batch.targets, self.temperature)
        rollout = batch.columns[ROLLOUT_LOGPROBS]
        output = self.loss(
            LossInputs(
                logprobs=logprobs,
                old_logprobs=batch.columns.get(OLD_LOGPROBS, rollout),
                rollout_logprobs=rollout,
                advantages=batch.columns[ADVANTAGES],
                sequence=batch.sequence,
                counts=counts,
                columns={name: batch.columns[name] for name in self.columns},
            ),
            self.loss_config,
        )
        if torch.is_grad_enabled():
            self.engine.backward(output.loss)
        current = logprobs.detach()
        return {
            "loss": output.loss.detach(),
            "entropy": entropy.sum(),
            "mismatch_kl": kl_estimate(rollout, current, "k3").sum(),
            "logprob_diff_mean": (current - rollout).abs().sum(),
            **output.metrics,
        }

    def _batch(self, samples: Mapping[int, Sample], members: MicroBatchPlan) -> MicroBatch:
        layout = pack if self.engine.config.packed else pad
        chosen = [samples[number] for number in members]
        return layout(chosen, self.column_names, self.engine.row_multiple).to(self.engine.device)

    @torch.no_grad()
    def _with_old_logprobs(self, samples: Mapping[int, Sample], plans: Sequence[MiniBatchPlan]) -> dict[int, Sample]:
        """The samples with a column of log-probs under the present weights."""
        scored = {
            number: replace(sample, columns={**sample.columns, OLD_LOGPROBS: torch.zeros(len(sample.tokens))})
            for number, sample in samples.items()
        }
        for plan in plans:
            for members in plan.of(self.groups.place.rank):
                batch = self._batch(scored, members)
                logprobs = token_logprobs(self.engine.logits(batch), batch.targets, self.temperature)[0].cpu()
                written = [int(scored[number].loss_mask.sum()) for number in members]
                for number, values in zip(members, logprobs.split(written), strict=True):
                    scored[number].columns[OLD_LOGPROBS][scored[number].loss_mask] = values
        return scored
