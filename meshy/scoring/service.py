"""The base of services that score rows: they take them as they become ready, every rank scores its own, and what it
says goes into the same rows."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshy.columns import TRAIN, PartitionContract
from meshy.learning.blank import filled
from meshy.models import model_folder
from meshy.queue.rows import Rows
from meshy.scoring.commands import ScoreRows, Settle
from meshy.scoring.config import ModelOptions
from meshy.scoring.intake import Intake, Portion
from meshy.scoring.writer import Writer
from meshy.service import Context
from meshy.service.exits import Unrecoverable
from meshy.spmd.fetch import Fetcher, FetchRows
from meshy.spmd.service import SpmdService
from meshy.titan.build import micro_batch_tokens
from meshy.titan.engine import TitanEngine
from meshy.titan.micro_batch import Sample
from meshy.titan.sharing import cut_shares

LINGER_SECONDS = 0.5  # that the GPUs are kept for whoever goes on with what was scored
PORTION_MICRO_BATCHES = 4  # of each rank, about, between two looks at what else is ready


class ScoringService(SpmdService):
    """A role fills:
    columns            what every rank reads of its rows, `tokens` and `loss_mask` among them.
    leader_columns     further numbers of a row that the leader wants to know.
    load()             every rank: build `self.engine` (collective, with the GPUs).
    score(samples)     every rank: columns by name, one entry a sample, for its part of a micro-batch (collective).
    after(portion)     rank 0: further commands, when a portion is scored; the GPUs are there.
    """

    config: ModelOptions
    engine: TitanEngine
    columns: tuple[str, ...] = ()
    leader_columns: tuple[str, ...] = ()

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.doing = "loading"
        self.rows_scored = self.tokens_scored = 0
        self.seconds = 0.0
        self.fetcher: Fetcher | None = None
        self.writer: Writer | None = None
        self.intake: Intake | None = None

    @property
    def folder(self) -> Any:
        """The model's, on this host."""
        return self.context.model_folder if self.config.model is None else model_folder(self.config.model)

    @property
    def contract(self) -> PartitionContract:
        return self.context.topology.contract.partition(TRAIN)

    def optional(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Of these, the ones that only some rows have (see `Produces.route`)."""
        return tuple(name for name in columns if name in self.contract.consumers[self.context.group.id].routed)

    # Every rank -------------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        super().setup()
        self.fetcher = Fetcher(self.queue, self.columns, self.optional(self.columns))
        self.writer = Writer(self.queue)
        with self.gpu():
            self.load()

    def load(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no load()")

    def score(self, samples: Sequence[Sample]) -> Mapping[str, Sequence[Any]]:
        raise NotImplementedError(f"{type(self).__name__} has no score()")

    def execute(self, command: Any) -> Any:
        match command:
            case ScoreRows():
                return self._score(command)
            case Settle():
                assert self.writer is not None
                return self.writer.settle()
        raise TypeError(f"{type(self).__name__} knows no command {type(command).__name__}")

    def aside(self, order: Any) -> None:
        assert self.fetcher is not None
        self.fetcher.obey(order, self.rank)

    @torch.no_grad()
    def _score(self, command: ScoreRows) -> None:
        assert self.fetcher is not None and self.writer is not None
        for members in command.micro_batches[self.rank]:
            rows = command.rows.select(members)
            samples = self.samples(rows) if members else []
            with self.timeline.span("score"):
                columns = self.score(samples)
            if members:
                check_finite(rows, columns)
                self.writer.write(rows, columns)
                self.keep(rows, samples, columns)
                self.fetcher.forget(rows.uids)

    def free_rank(self) -> None:
        self.engine.free()

    def restore_rank(self, payload: Mapping[str, Any]) -> None:
        self.engine.restore()

    def keep(self, rows: Rows, samples: Sequence[Sample], columns: Mapping[str, Sequence[Any]]) -> None:
        """What was scored, for a role that needs it later."""

    def samples(self, rows: Rows) -> list[Sample]:
        """These rows, as the model takes them."""
        assert self.fetcher is not None
        data = dict(self.fetcher.get(rows))
        lengths = [len(tokens) for tokens in data["tokens"]]
        for name in self.optional(self.columns):
            data[name] = filled(self.contract.columns[name], data[name], lengths)
        samples = []
        for i, uid in enumerate(rows.uids):
            tokens, mask = data["tokens"][i], data["loss_mask"][i]
            if len(mask) and mask[0]:
                raise Unrecoverable(
                    f"row {uid}: its first token is marked as written by the policy, but nothing predicts it; whoever "
                    "writes rows must give a prompt"
                )
            columns = {name: data[name][i] for name in self.columns if name not in ("tokens", "loss_mask")}
            samples.append(Sample(tokens=tokens, loss_mask=mask, columns=columns))
        return samples

    # Rank 0 -----------------------------------------------------------------------------------------------------------

    def take_in(self) -> Intake:
        return Intake(
            self.queue,
            world_size=self.world_size,
            tokens=PORTION_MICRO_BATCHES * micro_batch_tokens(self.config, self.recipe) * self.world_size,
            longest=self.recipe.context_length,
            alive=self.config.rows_to_wait_for(self.recipe),
            columns=self.leader_columns,
            optional=self.optional(self.leader_columns),
            share=lambda portion: self.tell_aside(FetchRows(portion.rows, portion.ranks)),
        )

    def lead(self) -> None:
        self.intake = self.take_in()
        while True:
            self.doing = "waiting for rows"
            portion: Portion | None = self.intake.next()
            with self.gpu():
                while portion is not None:
                    self.one(portion)
                    portion = self.intake.more()
                self.command(Settle())
                if self.ring is not None:
                    self.ring.wanted(LINGER_SECONDS)

    def one(self, portion: Portion) -> None:
        """Have every rank score its rows of a portion."""
        self.doing = f"scoring {len(portion.rows)} rows"
        began = time.time()
        micro_batches = cut_shares(
            range(len(portion.rows)),
            dict(enumerate(portion.ranks)),
            portion.lengths,
            self.world_size,
            micro_batch_tokens(self.config, self.recipe),
            self.config.packing == "packed",
        )
        self.command(ScoreRows(portion.rows, micro_batches))
        self.rows_scored += len(portion.rows)
        self.tokens_scored += sum(portion.lengths)
        self.seconds += time.time() - began
        self.after(portion)

    def after(self, portion: Portion) -> None:
        """Nothing, unless a role has more to do."""

    # What others see, and the end -------------------------------------------------------------------------------------

    def close(self) -> None:
        for part in (self.intake, self.fetcher, self.writer):
            if part is not None:
                part.close()
        super().close()

    def health(self) -> dict[str, Any]:
        return {"doing": self.doing, "rows": self.rows_scored, "rank": self.rank}

    def metrics(self) -> dict[str, float]:
        group = self.context.group.id
        return {
            f"{group}/rows": self.rows_scored,
            f"{group}/tokens": self.tokens_scored,
            f"{group}/tokens_per_second": self.tokens_scored / self.seconds if self.seconds else 0.0,
        }


def check_finite(rows: Rows, columns: Mapping[str, Sequence[Any]]) -> None:
    """Unrecoverable, naming the row and column of a number that is none: nobody may learn from it."""
    for name, values in columns.items():
        for uid, value in zip(rows.uids, values, strict=True):
            if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise Unrecoverable(
                    f"row {uid}: {name} holds NaN or infinite numbers; are the model's weights whole, and its dtype "
                    "wide enough?"
                )


def by_row(flat: Tensor, samples: Sequence[Sample]) -> list[Tensor]:
    """Entries of the written tokens of all samples, one after another, as a column: of each row's length, 0
    elsewhere."""
    flat = flat.cpu()
    counts = [int(sample.loss_mask.sum()) for sample in samples]
    rows = []
    for sample, values in zip(samples, flat.split(counts), strict=True):
        row = values.new_zeros(len(sample.tokens), *values.shape[1:])
        row[sample.loss_mask] = values
        rows.append(row)
    return rows
