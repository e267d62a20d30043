"""A real SGLang server that is killed while it generates: nothing is lost, and it is used again once it is back."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from meshy.queue.local import free_ports
from meshy.recipe import Sampling
from tests.generation.test_client import PROMPT, client_of, running
from tests.generation.test_failover import until
from tests.inference.real_sglang import HOST, sglang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

GREEDY = Sampling(max_new_tokens=400, temperature=0.0)


def test_a_killed_sglang_server_loses_nothing_and_is_used_again(replicas, folders):
    ports = free_ports(2)
    url = f"http://{HOST}:{ports[0]}"
    prompts = [[*PROMPT, last] for last in range(6)]

    async def answers(client):
        jobs = [asyncio.create_task(client.generate(prompt, GREEDY)) for prompt in prompts]
        await running(client, url, 3)
        return jobs

    async def work():
        async with client_of([url, replicas[0]]) as client:
            client.require(0)
            with sglang(folders[0], ports, context_length=480) as server:
                expected = await asyncio.gather(*await answers(client))
                assert {one.replica for one in expected} == {url, replicas[0]}
                jobs = await answers(client)
                os.kill(server.pid, signal.SIGKILL)
                done = await asyncio.gather(*jobs)
            for one, before in zip(done, expected, strict=True):
                assert one.replica == replicas[0] and one.tokens == before.tokens
                assert one.versions == [0] * len(one.tokens) and one.parts == 1
            assert client.rotation.fit == (replicas[0],) and client.numbers[url].retries == 3
            with sglang(folders[0], ports, context_length=480):
                await until(lambda: len(client.rotation.fit) == 2)
                again = await asyncio.gather(*await answers(client))
                assert [one.tokens for one in again] == [one.tokens for one in expected]
                assert {one.replica for one in again} == {url, replicas[0]}

    asyncio.run(asyncio.wait_for(work(), 380))
