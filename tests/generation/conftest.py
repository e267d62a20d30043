from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.inference.models import build, serve

OPTIONS = ("--context-length", "1024", "--max-running-requests", "16")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two sets of weights of one model."""
    root = tmp_path_factory.mktemp("models")
    return tuple(build(root / str(seed), "qwen3_grouped_untied", seed=seed) for seed in (0, 1))


@pytest.fixture(scope="session")
def processes(folders: tuple[Path, Path]) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Two servers with the first weights, as version 0, by their URLs."""
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        starting = [pool.submit(lambda: stack.enter_context(serve(folders[0], *OPTIONS))) for _ in range(2)]
        yield dict(future.result() for future in starting)


@pytest.fixture(scope="session")
def replicas(processes: dict[str, subprocess.Popen[str]]) -> list[str]:
    return list(processes)


@pytest.fixture
def pristine(replicas: list[str], folders: tuple[Path, Path]) -> Iterator[list[str]]:
    """The same servers for a test that loads weights or pauses: they serve version 0 again afterwards."""
    import asyncio

    from meshy.generation import GenerationClient
    from tests.generation.orders import publish_from_disk

    yield replicas

    async def reset() -> None:
        async with GenerationClient(replicas) as client:
            await publish_from_disk(client, folders[0], 0)

    asyncio.run(reset())
