"""The trainer: take a batch, learn, publish, open the gate; until the recipe's steps are done."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from meshy.algorithms.interface import AdvantageInputs, AdvantageOutput
from meshy.columns import EVAL, TRAIN
from meshy.importing import load
from meshy.learning.numbers import check_numbers
from meshy.learning.refine import Refiner, with_column
from meshy.learning.rewards import RewardRule
from meshy.observe.metrics import MetricsWriter
from meshy.queue.errors import QueueTimeout
from meshy.queue.rows import Rows
from meshy.service import Context
from meshy.spmd.fetch import Fetcher, FetchRows, ForgetRows
from meshy.spmd.service import SpmdService
from meshy.training.batch import RANK_COLUMNS, Batch, joined, samples_of, staleness
from meshy.training.collect import Collector
from meshy.training.commands import (
    ExpectWeights,
    GiveWeights,
    ShelveWeights,
    StreamWeights,
    TrainBatch,
    WriteWeights,
)
from meshy.training.config import TrainerConfig
from meshy.training.further import Further
from meshy.training.gates import Gates
from meshy.training.inbox import Group, rows_of
from meshy.training.learner import ADVANTAGES
from meshy.training.plan import MiniBatchPlan, Shares, mini_batches, plan_mini_batch
from meshy.training.publishing import Publishing
from meshy.training.report import Times, parts_together, step_row
from meshy.training.ring_publishing import RingPublishing
from meshy.training.schedule import learning_rate
from meshy.training.weights.folder import dtype_of


class TrainerService(SpmdService):
    """Every rank holds an engine and reads its own rows; rank 0 also gathers batches, publishes and reports."""

    config: TrainerConfig

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.step = 0
        self.doing = "starting"
        self.collector: Collector | None = None
        self.fetcher: Fetcher | None = None
        self._metrics: MetricsWriter | None = None
        self.publishing: Publishing | None = None
        self._last: dict[str, Any] = {}

    # Every rank -------------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        super().setup()
        from meshy.training.build import build_learner  # torchtitan: seconds to import, and its process group first

        contract = self.context.topology.contract.partition(TRAIN)
        config, recipe = self.config, self.recipe
        self.further = Further.of(config.further_columns, contract)
        columns = (*RANK_COLUMNS, *self.further.tokens)
        optional = self.further.optional.intersection(columns)
        self.fetcher = Fetcher(self.queue, columns, tuple(optional))  # connects before anybody waits for us
        with self.gpu():
            self.learner = build_learner(config, self.context.model_folder, recipe, self.groups, self.further.tokens)
        self.refiner = Refiner.of(config, self.groups, self.further.tokens)
        if self.rank == 0:
            served, stored = (
                dtype_of(self.context.model_folder, dtype)
                for dtype in (config.dtype_served(recipe), config.publish_dtype)
            )
            kind = Publishing if self.context.replica.ring is None else RingPublishing
            self.publishing = kind(self.context, self.command, served, stored, self.learner.engine.device)

    def execute(self, command: Any) -> Any:
        match command:
            case TrainBatch():
                return self._train(command)
            case WriteWeights() | StreamWeights() | ShelveWeights() | ExpectWeights():
                return self._give_weights(command)
        raise TypeError(f"the trainer knows no command {type(command).__name__}")

    def aside(self, order: Any) -> None:
        assert self.fetcher is not None
        self.fetcher.obey(order, self.rank)

    def _train(self, command: TrainBatch) -> dict[str, Any]:
        """Learn from this rank's rows, most of which have been read already; numbers over all ranks."""
        assert self.fetcher is not None
        began = time.time()
        mine = sorted(set().union(*(plan.samples(self.rank) for plan in command.plans)))
        rows = command.rows.select(mine)
        data = self.fetcher.get(rows)
        self.fetcher.forget(command.rows.uids)
        ages = staleness(rows, data, command.version, self.config.max_staleness)
        samples = samples_of(rows, data, mine, command.advantages, self.further.tokens)
        read = time.time()
        refined: dict[str, float] = {}
        if self.config.token_advantage is not None:
            tokens, refined = self.refiner.tokens(samples, command.rewards)
            samples = with_column(samples, ADVANTAGES, tokens.advantages)
        learnt = self.learner.train(samples, command.plans, command.epochs, command.learning_rates, command.version)
        self.timeline.record("train", read, self.learner.engine.synchronize())
        worst = self.groups.max(torch.tensor([float(ages.max()) if ages.numel() else 0.0, read - began]).double())
        counts = self.groups.sum(torch.bincount(ages, minlength=int(worst[0]) + 1).double())
        return {**learnt, **refined, "ages": counts.tolist(), "rank_queue": float(worst[1])}

    def free_rank(self) -> None:
        self.learner.engine.free()

    def restore_rank(self, payload: Mapping[str, Any]) -> None:
        self.learner.engine.restore()

    def _give_weights(self, command: GiveWeights) -> Any:
        """Collective: every rank gives its shards, parameter by parameter; rank 0 sees each whole."""
        tensors = self.learner.engine.hf_tensors()
        if self.publishing is not None:
            return self.publishing.take(command, tensors)
        for _ in tensors:
            pass
        return None

    # Rank 0 -----------------------------------------------------------------------------------------------------------

    def gpu_payload(self) -> dict[str, Any]:
        return self.publishing.payload if self.publishing is not None else {}

    def lead(self) -> None:
        config = self.config
        self._metrics = MetricsWriter(self.context.folder)
        assert self.publishing is not None
        self.gates = Gates(self.queue)
        self.shares = Shares(self.world_size, by_name=self.recipe.deterministic)
        self.dropped = 0  # samples, since the run began
        self._lost_before = 0  # what dropped groups told of groups that were lost before them, since the last step
        self.collector = Collector(
            self.queue,
            share=self._share,
            meanwhile=self.publishing.meanwhile,
            dropped=self._drop,
            further=self.further,
            rewards=RewardRule.of(config, self.recipe.sampling.max_new_tokens),
        )
        self.advantage = None if config.advantage is None else load(config.advantage)
        self.publishing.start()
        self._open_gate(0)
        self.doing = "waiting for the first evaluation"
        self.gates.clear_all(self.publishing.meanwhile)  # it is of these weights alone
        ended = time.time()
        while self.step < self.recipe.steps:
            ended = self._one_step(ended)
        self.doing = "waiting for the final evaluation"
        self.gates.clear_all(self.publishing.meanwhile)
        self._record_evaluations()

    def _share(self, rows: Rows, lengths: list[int]) -> list[int]:
        """On the collector's thread: say who is to train rows that have come, and have it fetch them."""
        ranks = [self.shares.rank_of(uid, length) for uid, length in zip(rows.uids, lengths, strict=True)]
        self.tell_aside(FetchRows(rows, tuple(ranks)))
        return ranks

    def _drop(self, groups: list[Group]) -> None:
        """They are too old to be trained: rollout may start as many others at once."""
        rows = rows_of(groups)
        self.tell_aside(ForgetRows(rows.uids))
        self.queue.clear(rows)
        self.dropped += len(rows)
        self._lost_before += sum(sum(group.columns["lost"]) for group in groups)
        self._open_gate(self.step)

    def _open_gate(self, version: int) -> None:
        retired = version * self.config.batch_size + self.dropped
        assert self.publishing is not None
        self.gates.open(version, retired, stop=version == self.recipe.steps, meanwhile=self.publishing.meanwhile)

    def _one_step(self, started: float) -> float:
        """Version `self.step` becomes the next one. Returns when the gate was open: the step's end."""
        assert self.collector is not None and self.publishing is not None
        step, dropped = self.step + 1, self.dropped
        times, batches, learnt = Times(started=started), [], []
        parts = self.config.part_sizes
        for part, samples in enumerate(parts):
            self.doing = f"waiting for batch {self.step}"
            batch = self.collector.collect(self.step, samples, self.config.max_staleness)
            asked = time.time()
            times.taken(batch, self.collector.waited, asked)
            with self.gpu():
                entered = time.time()
                self.doing = f"training batch {self.step}"
                self.publishing.unsettle()
                learnt.append(self._learn(batch, part))
                batches.append(batch)
                times.learnt(asked, entered, time.time(), learnt[-1].pop("rank_queue"))
                if part == len(parts) - 1:
                    self.doing = f"publishing weights v{step}"
                    self.publishing.stage(step, last=step == self.recipe.steps)
        whole = joined(batches)
        self.queue.clear(whole.rows)  # before the gate: no more is alive than the pace allows
        given = self.publishing.publish(step)
        self._open_gate(step)
        times.ended = time.time()
        self.step = step
        row = step_row(step, whole, parts_together(learnt), given, times)
        row |= {"dropped": self.dropped - dropped, "lost": row["lost"] + self._lost_before}
        self._lost_before = 0
        self._after_step(row)
        return times.ended

    def _learn(self, batch: Batch, part: int) -> dict[str, Any]:
        """Train a batch, or one part of it that is a mini-batch of its own."""
        config = self.config
        inputs = AdvantageInputs(
            rewards=batch.rewards, groups=batch.groups, names=batch.rows.uids, columns=batch.columns
        )
        if self.advantage is None:
            advantages = AdvantageOutput(advantages=torch.zeros_like(batch.rewards))
        else:
            advantages = self.advantage(inputs, **config.advantage_options)
            check_numbers("advantages", advantages.advantages, batch.rewards)
        without_gradient = []
        if self.advantage_is_all and getattr(self.learner.loss, "vanishes_at_zero_advantage", False):
            without_gradient = (advantages.advantages == 0).nonzero().flatten().tolist()
        command = TrainBatch(
            rows=batch.rows,
            rewards=tuple(batch.rewards.tolist()),
            advantages=tuple(advantages.advantages.tolist()),
            plans=self._plans(batch, without_gradient),
            epochs=config.epochs,
            learning_rates=self._learning_rates(part),
            version=self.step,
        )
        return {**self.command(command), **advantages.metrics}

    @property
    def advantage_is_all(self) -> bool:
        """Nothing but a sample's own advantage says what is learnt from it."""
        return self.config.token_advantage is None and not self.config.terms

    def _plans(self, batch: Batch, without_gradient: Sequence[int]) -> tuple[MiniBatchPlan, ...]:
        """The batch's mini-batches; a single one keeps the order of the data, several are drawn at random."""
        order = list(range(len(batch.rows)))
        count = 1 if self.config.stream_minibatch else self.config.mini_batches
        if count > 1:
            generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.step)
            order = torch.randperm(len(order), generator=generator).tolist()
        return tuple(
            plan_mini_batch(
                samples,
                batch.lengths,
                batch.written,
                world_size=self.world_size,
                tokens_per_micro_batch=self.learner.micro_batch_tokens,
                packed=self.learner.engine.config.packed,
                without_gradient=without_gradient,
                ranks=batch.ranks,
            )
            for samples in mini_batches(order, count)
        )

    def _learning_rates(self, part: int) -> tuple[float, ...]:
        config, count = self.config, self.config.optimiser_steps_per_batch
        steps = [part] if config.stream_minibatch else range(count)
        if self.step < config.frozen_batches:
            return tuple(0.0 for _ in steps)
        return tuple(
            learning_rate(
                (self.step - config.frozen_batches) * count + i,
                peak=config.lr,
                total=(self.recipe.steps - config.frozen_batches) * count,
                schedule=config.schedule,
                warmup=config.warmup_steps,
                final_factor=config.final_lr_factor,
            )
            for i in steps
        )

    def _after_step(self, row: dict[str, Any]) -> None:
        """What need not be done before rollout goes on: inference is already generating the next batch."""
        assert self.publishing is not None
        self.publishing.after_gate(self.step, last=self.step == self.recipe.steps)
        self.gates.clear_acknowledged()
        assert self._metrics is not None
        self._metrics.step(row)
        self._last = row
        self._record_evaluations()

    def _record_evaluations(self) -> None:
        assert self._metrics is not None
        while True:
            try:
                rows = self.queue.take(EVAL, timeout=0)
            except QueueTimeout:
                return  # none since
            columns: dict[str, Any] = self.queue.read(rows)
            for i in range(len(rows)):
                values = {name: values[i] for name, values in columns.items() if name != "uid"}
                self._metrics.evaluation({name: getattr(v, "item", lambda v=v: v)() for name, v in values.items()})
            self.queue.clear(rows)

    # What others see, and the end -------------------------------------------------------------------------------------

    def close(self) -> None:
        if self.collector is not None:
            self.collector.close()
        if self.fetcher is not None:
            self.fetcher.close()
        if self._metrics is not None:
            self._metrics.close()
        if self.publishing is not None:
            self.publishing.close()
        super().close()

    def health(self) -> dict[str, Any]:
        have = self.collector.have if self.collector is not None else 0
        told = {"step": self.step, "steps": self.recipe.steps, "doing": self.doing, "rows": have, "rank": self.rank}
        if self.publishing is not None and (behind := self.publishing.behind):
            told["behind"] = ", ".join(behind)
        return told

    def metrics(self) -> dict[str, float]:
        numbers = {name: float(value) for name, value in self._last.items() if isinstance(value, int | float)}
        return {f"train/{name}" if "/" not in name else name: value for name, value in numbers.items()}
