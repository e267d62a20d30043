"""The critic: says of each token what reward is still to come, and learns from what came."""

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from meshy.algorithms.aggregation import aggregate
from meshy.algorithms.interface import GlobalCounts
from meshy.algorithms.losses.value_loss import value_loss
from meshy.columns import BATCH, N_TOKENS, N_WRITTEN, POSITION
from meshy.learning.numbers import check_numbers, rewards_of
from meshy.learning.refine import Refiner, with_column
from meshy.learning.rewards import RewardRule
from meshy.observe.jsonl import JsonlWriter
from meshy.queue.rows import Rows
from meshy.scoring.batches import Batches, Whole
from meshy.scoring.commands import CriticStep, LearnBatch
from meshy.scoring.critic_config import CriticConfig
from meshy.scoring.intake import Portion
from meshy.scoring.service import ScoringService, by_row
from meshy.service import Context
from meshy.titan.build import build_engine, micro_batch_tokens
from meshy.titan.micro_batch import Sample
from meshy.titan.sharing import cut_shares

RETURNS = "returns"  # the column of a sample from which the critic learns
SUMS = ("value_loss", "clipped", "error", "return", "return_squared")


class CriticService(ScoringService):
    """Each rank keeps the rows that it has scored until their batch is whole, and learns from them then."""

    config: CriticConfig

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        config, recipe = self.config, self.recipe
        self.trainer = config.trainer(recipe)
        self.rule = RewardRule.of(self.trainer, recipe.sampling.max_new_tokens)
        self.columns = config.token_columns(recipe)
        names = (POSITION.name, BATCH.name, N_TOKENS.name, N_WRITTEN.name, *config.reward_columns(recipe))
        self.leader_columns = tuple(dict.fromkeys(names))
        self.kept: dict[str, Sample] = {}  # this rank's, by uid, with the values that were written
        self.batches = Batches(recipe.batch_size)
        self.batches_learnt = self.steps = 0
        self.last: dict[str, float] = {}
        self.lines: JsonlWriter | None = None

    def load(self) -> None:
        self.engine = build_engine(self.config, self.folder, self.recipe, value_head=True)
        self.refiner = Refiner.of(self.trainer, self.groups, self.config.of_tokens(self.recipe, self.contract))
        if self.rank == 0:
            self.lines = JsonlWriter(self.context.folder.path / f"{self.context.group.id}.jsonl")

    # Every rank -------------------------------------------------------------------------------------------------------

    def score(self, samples: Sequence[Sample]) -> Mapping[str, Sequence[Any]]:
        return {self.config.column: by_row(self.engine.values(self.engine.batch(samples)), samples)}

    def keep(self, rows: Rows, samples: Sequence[Sample], columns: Mapping[str, Sequence[Any]]) -> None:
        name = self.config.column
        for uid, sample, values in zip(rows.uids, samples, columns[name], strict=True):
            self.kept[uid] = Sample(sample.tokens, sample.loss_mask, {**sample.columns, name: values})

    def execute(self, command: Any) -> Any:
        if isinstance(command, LearnBatch):
            with self.timeline.span("train"):
                return self._learn(command)
        return super().execute(command)

    def _learn(self, command: LearnBatch) -> dict[str, float]:
        """The steps, on this rank's own rows; numbers over all ranks."""
        mine = {i: self.kept.pop(uid) for i, uid in enumerate(command.uids) if command.ranks[i] == self.rank}
        output, told = self.refiner.tokens(mine, command.rewards)
        if output.returns is None:
            raise ValueError(
                f"{self.trainer.token_advantage} gives no returns, and a critic learns from them; set the trainer's "
                "token_advantage to meshy.algorithms.advantages.gae:gae_advantage, or another that does"
            )
        check_numbers("returns", output.returns, output.advantages)
        samples = with_column(mine, RETURNS, output.returns)
        sums, norm = torch.zeros(len(SUMS), dtype=torch.float64), 0.0
        for step in command.steps:
            counts = GlobalCounts(tokens=step.tokens, sequences=step.sequences)
            for members in step.micro_batches[self.rank]:
                sums += self._micro_step([samples[i] for i in members], counts)
            norm = self.engine.step(step.learning_rate)
        totals = dict(zip(SUMS, self.groups.sum(sums).tolist(), strict=True))
        return {"grad_norm": norm, **told, **_means(totals, command.steps)}

    def _micro_step(self, samples: Sequence[Sample], counts: GlobalCounts) -> Float[Tensor, " sums"]:
        batch = self.engine.batch(samples, (self.config.column, RETURNS))
        values, returns = self.engine.logits(batch)[:, 0].float(), batch.columns[RETURNS]
        token_loss, clipped = value_loss(values, batch.columns[self.config.column], returns, self.config.clip)
        loss = aggregate(token_loss, batch.sequence, counts, "token-mean")
        self.engine.backward(loss)
        error = (values.detach() - returns).square().sum()
        told = (loss.detach(), clipped.sum(), error, returns.sum(), returns.square().sum())
        return torch.stack([value.double().cpu() for value in told])

    # Rank 0 -----------------------------------------------------------------------------------------------------------

    def after(self, portion: Portion) -> None:
        for batch in self.batches.add(portion.rows.uids, portion.ranks, portion.columns):
            self.doing = f"learning from batch {self.batches_learnt}"
            began = time.time()
            numbers = {
                name: rewards_of(name, batch.columns[name], batch.uids) for name in (N_WRITTEN.name, *self.rule.weights)
            }
            steps = self._steps(batch)
            command = LearnBatch(batch.uids, batch.ranks, tuple(self.rule.rewards(numbers).tolist()), steps)
            self.last = {**self.command(command), "seconds": time.time() - began}
            self.steps += len(steps)
            self.batches_learnt += 1
            assert self.lines is not None
            self.lines.write({"batch": self.batches_learnt, **self.last})

    def _steps(self, batch: Whole) -> tuple[CriticStep, ...]:
        """Epochs over mini-batches; a single one keeps the order of the data, several are drawn at random."""
        config = self.config
        order = torch.arange(len(batch.uids))
        if config.mini_batches > 1:
            generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.batches_learnt)
            order = torch.randperm(len(order), generator=generator)
        edges = [len(order) * i // config.mini_batches for i in range(config.mini_batches + 1)]
        parts = [order[start:end].tolist() for start, end in pairwise(edges)] * config.epochs
        return tuple(self._step(batch, part, self.steps + i) for i, part in enumerate(parts))

    def _step(self, batch: Whole, part: Sequence[int], number: int) -> CriticStep:
        config, written = self.config, batch.columns[N_WRITTEN.name]
        micro_batches = cut_shares(
            part,
            dict(enumerate(batch.ranks)),
            batch.columns[N_TOKENS.name],
            self.world_size,
            micro_batch_tokens(config, self.recipe),
            config.packing == "packed",
            least=1,
        )
        return CriticStep(
            micro_batches,
            tokens=sum(written[i] for i in part),
            sequences=sum(written[i] > 0 for i in part),
            learning_rate=config.lr * min(1.0, (number + 1) / (config.warmup_steps + 1)),
        )

    def close(self) -> None:
        if self.lines is not None:
            self.lines.close()
        super().close()

    def health(self) -> dict[str, Any]:
        return {**super().health(), "batches": self.batches_learnt}

    def metrics(self) -> dict[str, float]:
        group = self.context.group.id
        return {**super().metrics(), **{f"{group}/{name}": value for name, value in self.last.items()}}


def _means(totals: Mapping[str, float], steps: Sequence[CriticStep]) -> dict[str, float]:
    """Sums over all steps of a batch as means over their tokens; the loss, over the steps. explained_variance: the
    share of the returns' variance that the values explain; 1 is all of it, 0 is no better than their mean."""
    tokens = max(sum(step.tokens for step in steps), 1)
    mean = totals["return"] / tokens
    variance = totals["return_squared"] / tokens - mean**2
    explained = 1.0 - totals["error"] / tokens / variance if variance > 1e-12 else 0.0
    return {
        "value_loss": totals["value_loss"] / len(steps),
        "clip_fraction": totals["clipped"] / tokens,
        "return_mean": mean,
        "explained_variance": explained,
    }
