"""What the trainer says of each step: one flat row of numbers, for metrics.jsonl and TensorBoard. Pure."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshy.training.batch import Batch
from meshy.training.learner import FRESH
from meshy.training.weights.publisher import Published

COUNTS = ("groups", "zero_variance_groups", "single_sample_groups")


@dataclass(kw_only=True)
class Times:
    """Of a step. started: the end of the step before. trained: the last optimiser step was done. ended: the gate was
    written; unix seconds. The rest are seconds, added up over the parts of the batch: waiting for rows, for them to
    reach every rank once the last one was scored, for the GPUs, and training."""

    started: float
    trained: float = 0.0
    ended: float = 0.0
    waiting: float = 0.0
    queue: float = 0.0
    token: float = 0.0
    training: float = 0.0

    def taken(self, batch: Batch, waited: float, now: float) -> None:
        """The leader has the rows of a part, for which it has waited so long."""
        self.waiting += waited
        self.queue += min(waited, max(0.0, now - batch.last_rewarded))

    def learnt(self, asked: float, entered: float, now: float, rank_queue: float) -> None:
        """A part was trained. rank_queue: seconds until every rank had its rows."""
        self.token += entered - asked
        self.queue += rank_queue
        self.training += now - entered - rank_queue
        self.trained = now


def ages_row(ages: Sequence[float]) -> dict[str, float]:
    """Of a histogram of how many versions old the trained tokens were: `staleness_mean`, `staleness_max`, and the share
    of each age that occurs, `staleness/<age>`."""
    total = max(sum(ages), 1.0)
    shares = {f"staleness/{age}": count / total for age, count in enumerate(ages) if count}
    mean = sum(age * count for age, count in enumerate(ages)) / total
    return {
        "staleness_max": max((age for age, count in enumerate(ages) if count), default=0),
        "staleness_mean": mean,
        **shares,
    }


def parts_together(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What was learnt from the parts of a batch: their mean, but ages and COUNTS added up, and what is only true of
    fresh weights taken from the first part."""
    ages = [sum(counts) for counts in itertools.zip_longest(*(part["ages"] for part in parts), fillvalue=0.0)]
    together: dict[str, Any] = {}
    for name in parts[0]:
        values = [part[name] for part in parts if name in part]
        if name == "ages":
            together |= ages_row(ages)
        elif name in FRESH:
            together[name] = values[0]
        elif name in COUNTS:
            together[name] = sum(values)
        else:
            together[name] = sum(values) / len(values)
    return together | {"lr": parts[-1]["lr"]}


def step_row(
    step: int, batch: Batch, learnt: Mapping[str, float], published: Published, times: Times
) -> dict[str, Any]:
    """One line of metrics.jsonl.

    weight_version: the one that this step made. reward/<column>: where several add up to the reward, the part of
    reward_mean that each gives, its weight included.
    time/generate: from the first request to the last token. time/reward: from the last token to the last score.
    time/queue: from the last score until every rank had its rows. time/train: forward, backward, optimiser.
    time/token: in a ring, until the GPUs were the trainer's and everything on them.
    time/publish: export, load by every replica, gate; publish/pause, transfer, bracket are its parts at the replicas
    (see Published), publish/behind counts those that did not get the version. time/wait: the trainer without rows to
    take, which covers generate and reward. lost: groups that failed or were dropped by the filter on the way to this
    batch.
    """
    seconds = times.ended - times.started
    count = len(batch.rows)
    parts = batch.reward_parts if len(batch.reward_parts) > 1 else {}
    return {
        "step": step,
        "weight_version": step,
        "reward_mean": float(batch.rewards.mean()),
        "reward_std": float(batch.rewards.std(correction=0)),
        **{f"reward/{name}": float(values.mean()) for name, values in parts.items()},
        "response_length_mean": sum(batch.written) / count,
        **learnt,
        "samples": count,
        "tokens": batch.tokens,
        "prompts": batch.prompts,
        "lost": batch.lost,
        "truncated": batch.truncated / count,
        "fully_masked": sum(written == 0 for written in batch.written),
        "step_seconds": seconds,
        "tokens_per_second": batch.tokens / max(seconds, 1e-9),
        "time/generate": max(0.0, batch.last_generated - batch.first_sent),
        "time/reward": max(0.0, batch.last_rewarded - batch.last_generated),
        "time/queue": times.queue,
        "time/train": times.training,
        "time/token": times.token,
        "time/publish": times.ended - times.trained,
        "time/wait": times.waiting,
        "publish/mode": published.mode,
        "publish/pause": published.pause,
        "publish/transfer": published.transfer,
        "publish/bracket": published.bracket,
        "publish/bytes": published.bytes,
        "publish/behind": len(published.behind),
        "started": times.started,
        "ended": times.ended,
    }
