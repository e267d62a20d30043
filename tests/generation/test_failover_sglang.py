"""A real SGLang server that is killed while it generates: nothing is lost, and it is used again once it is back."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshy.inference.model_config import read_model_config
from meshy.inference.sglang.arguments import ServerPlan
from meshy.inference.sglang.interpreter import interpreter
from meshy.inference.sglang.server import SglangServer
from meshy.recipe import Sampling
from tests.generation.test_client import PROMPT, client_of, running
from tests.generation.test_failover import until

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

HOST = "127.0.0.1"
GREEDY = Sampling(max_new_tokens=400, temperature=0.0)


@contextmanager
def sglang(folder: Path, port: int, meeting: int) -> Iterator[SglangServer]:
    plan = ServerPlan(
        python=interpreter(None),
        model=read_model_config(folder),
        host=HOST,
        port=port,
        rendezvous=f"{HOST}:{meeting}",
        on_gpu=False,
        dtype="auto",
        context_length=480,
        max_running_requests=8,
        weight_version=0,
        random_seed=0,
    )
    server = SglangServer(plan)
    try:
        server.start()
        server.wait_ready(150)
        yield server
    finally:
        server.close()


def test_a_killed_sglang_server_loses_nothing_and_is_used_again(replicas, folders):
    with socket.socket() as one, socket.socket() as two:
        one.bind((HOST, 0))
        two.bind((HOST, 0))
        ports = one.getsockname()[1], two.getsockname()[1]
    url = f"http://{HOST}:{ports[0]}"
    prompts = [[*PROMPT, last] for last in range(6)]

    async def answers(client):
        jobs = [asyncio.create_task(client.generate(prompt, GREEDY)) for prompt in prompts]
        await running(client, url, 3)
        return jobs

    async def work():
        async with client_of([url, replicas[0]]) as client:
            client.require(0)
            with sglang(folders[0], *ports) as server:
                expected = await asyncio.gather(*await answers(client))
                assert {one.replica for one in expected} == {url, replicas[0]}
                jobs = await answers(client)
                os.kill(server.pid, signal.SIGKILL)
                done = await asyncio.gather(*jobs)
            for one, before in zip(done, expected, strict=True):
                assert one.replica == replicas[0] and one.tokens == before.tokens
                assert one.versions == [0] * len(one.tokens) and one.parts == 1
            assert client.rotation.fit == (replicas[0],) and client.numbers[url].retries == 3
            with sglang(folders[0], *ports):
                await until(lambda: len(client.rotation.fit) == 2)
                again = await asyncio.gather(*await answers(client))
                assert [one.tokens for one in again] == [one.tokens for one in expected]
                assert {one.replica for one in again} == {url, replicas[0]}

    asyncio.run(asyncio.wait_for(work(), 380))
