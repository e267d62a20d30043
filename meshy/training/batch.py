"""Rows of partition `train` on their way to the engine: what the leader must know, and each rank's samples."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from meshy.columns import N_WRITTEN, Column
from meshy.learning.blank import filled
from meshy.learning.numbers import numbers_of, rewards_of
from meshy.learning.rewards import RewardRule, total
from meshy.queue.rows import Rows
from meshy.titan.micro_batch import Sample
from meshy.training.inbox import LEADER_COLUMNS, Group, rows_of
from meshy.training.learner import ADVANTAGES, ROLLOUT_LOGPROBS, TOKEN_VERSIONS

# Read by the rank that trains the row.
RANK_COLUMNS = ("tokens", "loss_mask", ROLLOUT_LOGPROBS, "token_versions")


class BadRows(ValueError):
    """Rows that cannot be trained; the message names the row and its writer's mistake."""


@dataclass(frozen=True)
class Batch:
    """What the leader knows of a batch, or a part of one, in the order of the data; entry i of everything is sample i.

    reward_parts: what adds up to the rewards, by column. columns: further numbers of each sample, NaN where it has
    none. ranks: who has been told to fetch it. lost: groups that gave no rows before these did.
    """

    rows: Rows
    reward_parts: Mapping[str, Float[Tensor, " samples"]]
    columns: Mapping[str, Float[Tensor, " samples"]]
    groups: Int[Tensor, " samples"]
    lengths: tuple[int, ...]
    written: tuple[int, ...]
    ranks: tuple[int, ...]
    prompts: int
    truncated: int
    lost: int
    first_sent: float
    last_generated: float
    last_rewarded: float

    @property
    def rewards(self) -> Float[Tensor, " samples"]:
        """By the recipe's rule."""
        return total(self.reward_parts)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def batch_of(groups: Sequence[Group], rewards: RewardRule | None = None) -> Batch:
    """Whole groups sorted by position, and in each the rows by uid. rewards: None for column `reward` as it is."""
    rows = rows_of(groups)
    ranks = [rank for group in groups for rank in group.ranks]
    columns = {name: [value for group in groups for value in group.columns[name]] for name in groups[0].columns}
    order = sorted(
        range(len(rows)),
        key=lambda i: (columns["position"][i], columns["group_id"][i], len(rows.uids[i]), rows.uids[i]),
    )
    ordered, rule = rows.select(order), rewards or RewardRule()
    numbers: dict[str, int] = {}

    def told(name: str) -> list[Any]:
        return [columns[name][i] for i in order]

    return Batch(
        rows=ordered,
        reward_parts=rule.parts({n: rewards_of(n, told(n), ordered.uids) for n in (*rule.weights, N_WRITTEN.name)}),
        columns={name: numbers_of(told(name)) for name in columns if name not in LEADER_COLUMNS},
        groups=torch.tensor([numbers.setdefault(columns["group_id"][i], len(numbers)) for i in order]),
        lengths=tuple(columns["n_tokens"][i] for i in order),
        written=tuple(columns["n_written"][i] for i in order),
        ranks=tuple(ranks[i] for i in order),
        prompts=len(set(columns["prompt_id"])),
        truncated=sum(columns["truncated"]),
        lost=sum(columns["lost"]),
        first_sent=min(columns["t_sent"]),
        last_generated=max(columns["t_generated"]),
        last_rewarded=max(columns["t_rewarded"]),
    )


def joined(parts: Sequence[Batch]) -> Batch:
    """The parts of a batch that were trained one after another, for the report. prompts: those of different parts count
    as different ones, which is what they are within an epoch."""
    counts = [0, *itertools.accumulate(int(part.groups.max()) + 1 for part in parts)]
    return Batch(
        rows=Rows.concat([part.rows for part in parts]),
        reward_parts={n: torch.cat([part.reward_parts[n] for part in parts]) for n in parts[0].reward_parts},
        columns={name: torch.cat([part.columns[name] for part in parts]) for name in parts[0].columns},
        groups=torch.cat([part.groups + count for part, count in zip(parts, counts, strict=False)]),
        lengths=tuple(length for part in parts for length in part.lengths),
        written=tuple(written for part in parts for written in part.written),
        ranks=tuple(rank for part in parts for rank in part.ranks),
        prompts=sum(part.prompts for part in parts),
        truncated=sum(part.truncated for part in parts),
        lost=sum(part.lost for part in parts),
        first_sent=min(part.first_sent for part in parts),
        last_generated=max(part.last_generated for part in parts),
        last_rewarded=max(part.last_rewarded for part in parts),
    )


def samples_of(
    rows: Rows,
    data: Mapping[str, Any],
    numbers: Sequence[int],
    advantages: Sequence[float],
    further: Mapping[str, Column] | None = None,
) -> dict[int, Sample]:
    """Samples by number, from columns of `rows` (entry k is sample numbers[k]). advantages: of the whole batch.
    further: more per-token columns; a row that lacks one (None) holds NaN there, or -1 where it is of whole numbers.

    Raises BadRows for a first token that claims to be written by the policy, or per-token columns of another length.
    """
    further = further or {}
    samples = {}
    lengths = [len(tokens) for tokens in data["tokens"]]
    more = {name: filled(column, data[name], lengths) for name, column in further.items()}
    for k, (uid, number) in enumerate(zip(rows.uids, numbers, strict=True)):
        tokens, mask = data["tokens"][k], data["loss_mask"][k]
        columns = {name: data[name][k] for name in (ROLLOUT_LOGPROBS, TOKEN_VERSIONS)}
        columns |= {name: rows_[k] for name, rows_ in more.items()}
        for name, values in {"loss_mask": mask, **columns}.items():
            if len(values) != len(tokens):
                raise BadRows(f"row {uid}: column {name!r} has {len(values)} entries for {len(tokens)} tokens")
        if len(mask) and mask[0]:
            raise BadRows(f"row {uid}: its first token is marked as written by the policy, but nothing predicts it")
        columns[ADVANTAGES] = torch.full((len(tokens),), advantages[number], dtype=torch.float32)
        samples[number] = Sample(tokens=tokens, loss_mask=mask, columns=columns)
    return samples


def staleness(rows: Rows, data: Mapping[str, Any], version: int, max_staleness: int | None) -> Int[Tensor, " tokens"]:
    """version - token_versions of every trained token: how many publishes ago it was written.

    Raises BadRows for a token of a version to come, or one older than `max_staleness` allows.
    """
    ages = []
    for uid, versions, mask in zip(rows.uids, data["token_versions"], data["loss_mask"], strict=True):
        age = version - versions[mask].long()
        if age.numel() and int(age.min()) < 0:
            raise BadRows(
                f"row {uid} holds tokens of weight version {int(versions.max())}, but {version} is being trained"
            )
        if age.numel() and max_staleness is not None and int(age.max()) > max_staleness:
            raise BadRows(
                f"row {uid} holds tokens {int(age.max())} versions old, but max_staleness is {max_staleness}: rollout "
                "runs further ahead than the trainer allows"
            )
        ages.append(age)
    return torch.cat(ages) if ages else torch.zeros(0, dtype=torch.long)
