"""What tests tell replicas through a client, as a trainer would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshy.generation import GenerationClient, commands
from meshy.generation.completion import weight_version_of


async def publish_from_disk(client: GenerationClient, folder: Path, version: int, *, drain: bool = False) -> None:
    """All replicas load the folder; requests in flight go on with the new weights, or, with `drain`, end first."""
    if not drain:
        await client.everywhere(commands.pause("retract"))
    await client.everywhere(commands.update_from_disk(folder, version))
    if not drain:
        await client.everywhere(commands.CONTINUE)


async def versions(client: GenerationClient) -> dict[str, int]:
    """{url: weight version that it serves}."""
    return {url: weight_version_of(info, url) for url, info in (await client.everywhere(commands.MODEL_INFO)).items()}


async def load_of(client: GenerationClient, url: str) -> dict[str, Any]:
    """num_running_reqs, num_waiting_reqs, queues and so on of one replica."""
    return (await client.everywhere(commands.LOADS))[url]["loads"][0]
