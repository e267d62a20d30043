"""What the trainer says of each step: one flat row of numbers, for metrics.jsonl and TensorBoard. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshy.training.batch import Batch
from meshy.training.weights.publisher import Published


@dataclass(frozen=True, kw_only=True)
class Times:
    """Moments of a step, unix seconds.

    started: the end of the step before. taken: the batch was complete and read by the leader. entered: the GPUs were
    there. trained, published: done. ended: the gate was written. waited, queue_work: seconds that the leader waited for
    rows, and spent on reading them.
    rank_queue: seconds that the slowest rank spent on reading its rows.
    """

    started: float
    taken: float
    entered: float
    trained: float
    published: float
    ended: float
    waited: float
    queue_work: float
    rank_queue: float


def step_row(
    step: int, version: int, batch: Batch, learnt: Mapping[str, float], published: Published, times: Times
) -> dict[str, Any]:
    """One line of metrics.jsonl.

    weight_version: the one that this step made. time/generate: from the first request to the last token. time/reward:
    from the last token to the last score. time/queue: reading rows, once all are there. time/train: forward, backward,
    optimiser. time/token: in a ring, until the GPUs were the trainer's and everything on them. time/publish: export,
    load by every replica, gate; publish/pause, transfer, bracket are its parts at the replicas (see Published),
    publish/behind counts those that did not get the version. time/wait: the trainer
    without rows to take, which covers generate and reward.
    """
    seconds = times.ended - times.started
    count = len(batch.rows)
    return {
        "step": step,
        "weight_version": version,
        "reward_mean": float(batch.rewards.mean()),
        "reward_std": float(batch.rewards.std(correction=0)),
        "response_length_mean": sum(batch.written) / count,
        **learnt,
        "samples": count,
        "tokens": batch.tokens,
        "prompts": batch.prompts,
        "truncated": batch.truncated / count,
        "fully_masked": sum(written == 0 for written in batch.written),
        "step_seconds": seconds,
        "tokens_per_second": batch.tokens / max(seconds, 1e-9),
        "time/generate": max(0.0, batch.last_generated - batch.first_sent),
        "time/reward": max(0.0, batch.last_rewarded - batch.last_generated),
        "time/queue": times.queue_work + times.rank_queue,
        "time/train": times.trained - times.entered - times.rank_queue,
        "time/token": times.entered - times.taken,
        "time/publish": times.ended - times.trained,
        "time/wait": times.waited,
        "publish/mode": published.mode,
        "publish/pause": published.pause,
        "publish/transfer": published.transfer,
        "publish/bracket": published.bracket,
        "publish/bytes": published.bytes,
        "publish/behind": len(published.behind),
        "started": times.started,
        "ended": times.ended,
    }
