"""Rows of partition `train` as rollout puts them, small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshy.columns import ANY_BATCH
from meshy.queue.rows import Rows
from meshy.training.inbox import LEADER_COLUMNS, Group, Inbox


def group_columns(position: int, size: int = 2, *, batch: int = ANY_BATCH, length: int = 4, **changes: Any) -> dict:
    """Every column of a group whose rows have `length`, `length + 1` ... tokens, all but the first the policy's.
    changes: of columns, a value for all rows."""
    lengths = [length + i for i in range(size)]
    columns = {
        "uid": [f"{position}.{i}" for i in range(size)],
        "prompt_id": [f"p{position}"] * size,
        "group_id": [str(position)] * size,
        "group_size": [size] * size,
        "position": [position] * size,
        "batch": [batch] * size,
        "tokens": [torch.arange(n) + 1000 * position for n in lengths],
        "loss_mask": [torch.arange(n) > 0 for n in lengths],
        "rollout_logprobs": [torch.full((n,), -float(position)) for n in lengths],
        "token_versions": [torch.zeros(n, dtype=torch.int32) for n in lengths],
        "n_tokens": lengths,
        "n_written": [n - 1 for n in lengths],
        "oldest_version": [0] * size,
        "reward": [float(i) for i in range(size)],
        "finish_reason": ["stop"] * size,
        "truncated": [False] * size,
        "n_turns": [1] * size,
        "lost": [0] * size,
        "t_sent": [float(position)] * size,
        "t_generated": [10.0 + position] * size,
        "t_rewarded": [20.0 + position] * size,
    }
    return columns | {name: [value] * size for name, value in changes.items()}


def arrive(inbox: Inbox, columns: dict[str, list[Any]], which: Sequence[int] | None = None, rank: int = 0) -> None:
    """Some rows of a group, or all, come into the inbox."""
    which = range(len(columns["uid"])) if which is None else which
    uids = tuple(columns["uid"][i] for i in which)
    rows = Rows("train", uids, tuple(range(len(uids))), "trainer")
    inbox.add(rows, {name: [columns[name][i] for i in which] for name in LEADER_COLUMNS}, [rank] * len(uids))


def groups(*columns: dict[str, list[Any]], ranks: Sequence[int] = ()) -> list[Group]:
    """Whole groups, in the order in which they came."""
    inbox = Inbox()
    for i, some in enumerate(columns):
        arrive(inbox, some, rank=ranks[i] if ranks else 0)
    return list(inbox.groups.values())
