"""The replicas of inference as rollout sees them, for `/health` and `/metrics`."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any

from meshy.generation import GenerationClient

QUEUE_SECONDS = 2.0  # that replicas may take to tell of their queues


def replica_numbers(client: GenerationClient) -> dict[str, dict[str, float]]:
    """By URL: what the client has seen of each."""
    return {
        url: {**numbers.to_json(), "seconds_out": client.rotation.seconds_out(url)}
        for url, numbers in client.numbers.items()
    }


def trouble(client: GenerationClient) -> str:
    """Which replicas are out of rotation and why; empty if none is."""
    out, rotation = client.rotation.reasons(), client.rotation
    return f"{len(rotation.fit)} of {len(rotation.replicas)} inference replicas: {'; '.join(out)}" if out else ""


def replica_metrics(client: GenerationClient, loop: asyncio.AbstractEventLoop) -> dict[str, float]:
    """`inference/<replica>/<number>`, and `queue` from those that say how many requests wait there. For another thread
    than that of the client's loop."""
    metrics = {"rollout/client_seconds": client.own_seconds()}
    queues = _queues(client, loop)
    for index, (url, numbers) in enumerate(replica_numbers(client).items()):
        if url in queues:
            numbers["queue"] = queues[url]
        metrics |= {f"inference/{index}/{name}": value for name, value in numbers.items()}
    return metrics


def _queues(client: GenerationClient, loop: asyncio.AbstractEventLoop) -> dict[str, Any]:
    if not loop.is_running():
        return {}
    asked = asyncio.run_coroutine_threadsafe(client.queues(), loop)
    try:
        return asked.result(QUEUE_SECONDS)
    except (TimeoutError, concurrent.futures.CancelledError):
        return {}  # the loop ends at this moment
