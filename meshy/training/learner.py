"""One rank's part in training: micro-batches through the engine and the loss, numbers summed over all ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from meshy.algorithms.correction import Correction, OldLogprobs
from meshy.algorithms.importance import effective_sample_size
from meshy.algorithms.interface import GlobalCounts, LossConfig, LossInputs, LossOutput
from meshy.algorithms.kl import kl_estimate
from meshy.algorithms.logprobs import token_logprobs
from meshy.algorithms.off_policy import off_policy_factor
from meshy.algorithms.proximal import loglinear_proximal, proximal_share
from meshy.algorithms.ratios import bounded_ratio
from meshy.columns import Column
from meshy.learning.blank import without_tokens
from meshy.spmd.groups import ProcessGroups
from meshy.titan.engine import TitanEngine
from meshy.titan.micro_batch import MicroBatch, Sample
from meshy.titan.sharing import MicroBatchPlan
from meshy.training.plan import MiniBatchPlan

ADVANTAGES, ROLLOUT_LOGPROBS, TOKEN_VERSIONS = "advantages", "rollout_logprobs", "token_versions"
OLD_LOGPROBS, PROXIMAL_SHARE = "old_logprobs", "proximal_share"  # columns that the learner adds itself
PER_SEQUENCE = ("correction/vetoed",)
FRESH = ("mismatch_kl", "logprob_diff_mean", "ess")
Loss = Callable[[LossInputs, LossConfig], LossOutput]


@dataclass(frozen=True)
class Term:
    """A loss that is added to another, `weight` times. name: before its metrics."""

    name: str
    loss: Loss
    config: LossConfig
    weight: float


@dataclass(frozen=True, kw_only=True)
class Learner:
    """temperature: of sampling; logits are divided by it before log-probs are taken. micro_batch_tokens: what a plan
    may put into one forward pass. old_logprobs: of the policy whose ratio is clipped: the inference engine's
    ("rollout"), scored anew before the first step ("recompute"), or between the engine's and the current ones by the
    age of each token ("loglinear", which reads the column `token_versions`). terms: added to the loss. columns:
    per-token columns that samples carry beside advantages and rollout log-probs, handed on to loss and terms."""

    engine: TitanEngine
    groups: ProcessGroups
    loss: Loss
    loss_config: LossConfig
    terms: tuple[Term, ...] = ()
    temperature: float
    micro_batch_tokens: int
    old_logprobs: OldLogprobs = "rollout"
    correction: Correction = field(default_factory=Correction)
    columns: Mapping[str, Column] = field(default_factory=dict)

    @property
    def column_names(self) -> tuple[str, ...]:
        old = {"rollout": (), "recompute": (OLD_LOGPROBS,), "loglinear": (PROXIMAL_SHARE,)}[self.old_logprobs]
        return (ADVANTAGES, ROLLOUT_LOGPROBS, *old, *self.columns)

    def train(
        self,
        samples: Mapping[int, Sample],
        plans: Sequence[MiniBatchPlan],
        epochs: int,
        learning_rates: Sequence[float],
        version: int | None = None,
    ) -> dict[str, float]:
        """One optimiser step for each plan, `epochs` times over. samples: this rank's, by their number in the plans.
        learning_rates: one for each step. version: of the weights that training starts from; "loglinear" needs it.

        Returns means over all ranks: `loss` and `grad_norm` over the steps, what the loss reports per token, `entropy`
        (nats), and, of the first step only, whose rows are fresh, `mismatch_kl` (k3 of rollout against trainer),
        `logprob_diff_mean` (mean |trainer - rollout|) and `ess`, the effective sample size, as a share, of the token
        ratios trainer / rollout. `lr` is the last one. Of samples without a gradient, means are an estimate from some
        of them (see MiniBatchPlan).
        With a correction also, over the steps: `correction/weight_mean` and `correction/ess` of the factors on the
        advantages, the share of tokens that it dropped, `correction/dropped`, and what each rule in force did by
        itself: `truncated` or `masked`, `rejected` and `opsm`, shares of tokens, `vetoed`, of sequences.
        """
        samples = self.prepare(samples, plans, version)
        steps: list[dict[str, float]] = []
        rates = iter(learning_rates)
        for _ in range(epochs):
            for plan in plans:
                steps.append(self._optimiser_step(samples, plan, next(rates)))
        fresh = {name: steps[0][name] for name in FRESH}
        means = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
        return {**means, **fresh, "lr": learning_rates[len(steps) - 1]}

    def _optimiser_step(self, samples: Mapping[int, Sample], plan: MiniBatchPlan, lr: float) -> dict[str, float]:
        sums = self.accumulate(samples, plan)
        norm = self.engine.step(lr)
        return {"loss": sums.pop("loss"), "grad_norm": norm, **shares(sums, plan)}

    def prepare(
        self, samples: Mapping[int, Sample], plans: Sequence[MiniBatchPlan], version: int | None = None
    ) -> dict[int, Sample]:
        """The samples with what `old_logprobs` takes beside the rows themselves. version: as for `train`."""
        match self.old_logprobs:
            case "recompute":
                return self._with_old_logprobs(samples, plans)
            case "loglinear":
                if version is None:
                    raise ValueError("log-linear proximal log-probs need the weight version that training starts from")
                return {
                    number: _with_column(
                        sample, PROXIMAL_SHARE, proximal_share(version - sample.columns[TOKEN_VERSIONS])
                    )
                    for number, sample in samples.items()
                }
        return dict(samples)

    def accumulate(self, samples: Mapping[int, Sample], plan: MiniBatchPlan) -> dict[str, float]:
        """Forward and backward over the mini-batch: adds to the gradients, and returns `loss` and token sums, both
        over all ranks."""
        counts = GlobalCounts(tokens=plan.tokens, sequences=plan.sequences)
        totals: dict[str, Tensor] = {}
        rank = self.groups.place.rank
        scored, trained = (plan.scored[rank], False, plan.scored_weight), (plan.trained[rank], True, 1.0)
        for micro_batches, with_gradient, weight in (scored, trained):
            for members in micro_batches:
                with torch.set_grad_enabled(with_gradient):
                    said = self._micro_step(self._batch(samples, members), counts)
                for name, value in said.items():
                    totals[name] = totals.get(name, 0.0) + weight * value
        names = sorted(totals)
        summed = self.groups.sum(torch.stack([totals[name].double() for name in names]).cpu())
        return dict(zip(names, summed.tolist(), strict=True))

    def _micro_step(self, batch: MicroBatch, counts: GlobalCounts) -> dict[str, Tensor]:
        logits = self.engine.logits(batch)
        logprobs, entropy = token_logprobs(logits, batch.targets, self.temperature)
        current, rollout = logprobs.detach(), batch.columns[ROLLOUT_LOGPROBS]
        old = self._old_logprobs(batch, current)
        advantages, corrected = self._correct(batch, current, old)
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=old,
            rollout_logprobs=rollout,
            advantages=advantages,
            sequence=batch.sequence,
            counts=counts,
            columns={name: self._column(batch, column) for name, column in self.columns.items()},
            logits=logits,
            temperature=self.temperature,
        )
        output = self.loss(inputs, self.loss_config)
        loss, said = output.loss, dict(output.metrics)
        for term in self.terms:
            more = term.loss(inputs, term.config)
            loss = loss + term.weight * more.loss
            said |= {f"{term.name}/{name}": value for name, value in more.metrics.items()}
        if torch.is_grad_enabled():
            self.engine.backward(loss)
        ratio = bounded_ratio((current - rollout).double())
        return {
            "loss": loss.detach(),
            "entropy": entropy.sum(),
            "mismatch_kl": kl_estimate(rollout, current, "k3").sum(),
            "logprob_diff_mean": (current - rollout).abs().sum(),
            "ess/weight": ratio.sum(),
            "ess/weight_squared": ratio.square().sum(),
            **{f"correction/{name}": value for name, value in corrected.items()},
            **said,
        }

    @staticmethod
    def _column(batch: MicroBatch, column: Column) -> Tensor:
        """Of this type also where the micro-batch holds no token at all."""
        values = batch.columns[column.name]
        return values if len(values) else without_tokens(column).to(values.device)

    def _old_logprobs(self, batch: MicroBatch, current: Tensor) -> Tensor:
        rollout = batch.columns[ROLLOUT_LOGPROBS]
        if self.old_logprobs == "loglinear":
            return loglinear_proximal(rollout, current, batch.columns[PROXIMAL_SHARE])
        return batch.columns.get(OLD_LOGPROBS, rollout)

    def _correct(self, batch: MicroBatch, current: Tensor, old: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The advantages times the off-policy factor of each token, and sums to report of it."""
        advantages = batch.columns[ADVANTAGES]
        if not self.correction.active:
            return advantages, {}
        factor, sums = off_policy_factor(
            self.correction,
            logprobs=current,
            train_logprobs=current if self.old_logprobs == "rollout" else old,
            rollout_logprobs=batch.columns[ROLLOUT_LOGPROBS],
            advantages=advantages,
            sequence=batch.sequence,
        )
        return advantages * factor, sums

    def _batch(self, samples: Mapping[int, Sample], members: MicroBatchPlan) -> MicroBatch:
        return self.engine.batch([samples[number] for number in members], self.column_names, multiple=1)

    @torch.no_grad()
    def _with_old_logprobs(self, samples: Mapping[int, Sample], plans: Sequence[MiniBatchPlan]) -> dict[int, Sample]:
        """The samples with a column of log-probs under the present weights."""
        scored = {
            number: _with_column(sample, OLD_LOGPROBS, torch.zeros(len(sample.tokens)))
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


def _with_column(sample: Sample, name: str, values: Tensor) -> Sample:
    return replace(sample, columns={**sample.columns, name: values})


def shares(sums: Mapping[str, float], plan: MiniBatchPlan) -> dict[str, float]:
    """Sums over a mini-batch as means over its tokens, or its sequences; of weights, their effective sample size."""
    tokens, sequences = max(plan.tokens, 1), max(plan.sequences, 1)
    means = {name: value / (sequences if name in PER_SEQUENCE else tokens) for name, value in sums.items()}
    del means["ess/weight"], means["ess/weight_squared"]
    means["ess"] = effective_sample_size(sums["ess/weight"], sums["ess/weight_squared"], plan.tokens)
    if "correction/weight" in sums:
        means["correction/weight_mean"] = means.pop("correction/weight")
        del means["correction/weight_squared"]
        weight, squared = sums["correction/weight"], sums["correction/weight_squared"]
        means["correction/ess"] = effective_sample_size(weight, squared, plan.tokens)
    return means
