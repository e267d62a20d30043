"""The sleeping engine through Meshy's own client, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from meshy.generation import GenerationClient, commands
from meshy.generation.transport import Refused
from meshy.recipe import Sampling
from scripts.bench.pace.engine import SleepingServer
from scripts.bench.pace.lengths import response_length
from scripts.bench.pace.roles import SleepingEngineConfig

PROMPT = [3, 20, 21, 4]
PATIENCE = 20.0


@asynccontextmanager
async def serving(
    step_seconds: float = 0.0005, slots: int = 32
) -> AsyncIterator[tuple[SleepingServer, GenerationClient]]:
    server = SleepingServer(SleepingEngineConfig(step_seconds=step_seconds, slots=slots))
    async with server.on("127.0.0.1", 0) as port, asyncio.timeout(PATIENCE):
        async with GenerationClient([f"http://127.0.0.1:{port}"], vocab_size=264, deadline=PATIENCE) as client:
            yield server, client
        server.stop()


def seed_with(length: range) -> int:
    return next(seed for seed in range(0, 2**31, 9_999_991) if response_length(seed) in length)


def test_lengths_versions_and_log_probs() -> None:
    """A response has the length that its seed says, and ends with the end token."""

    async def play() -> None:
        async with serving() as (_, client):
            seeds = [i * 100_000_007 % 2**31 for i in range(64)]
            many = Sampling(max_new_tokens=10_000)
            done = await asyncio.gather(*(client.generate(PROMPT, many, seed=seed) for seed in seeds))
            assert [len(c.tokens) for c in done] == [response_length(seed) for seed in seeds]
            assert all(c.finish_reason == "stop" and c.tokens[-1] == 1 for c in done)
            assert all(len(c.logprobs) == len(c.tokens) and set(c.versions) == {0} for c in done)
            assert len({c.tokens[0] for c in done if len(c.tokens) > 1}) == 1

    asyncio.run(play())


def test_a_response_is_cut_off_at_its_limit() -> None:
    async def play() -> None:
        async with serving() as (_, client):
            done = await client.generate(PROMPT, Sampling(max_new_tokens=5), seed=seed_with(range(50, 90)))
            assert (len(done.tokens), done.finish_reason) == (5, "length")

    asyncio.run(play())


def test_a_new_version_does_not_interrupt() -> None:
    """It is set while a long response is being written, which then holds tokens of both."""

    async def play() -> None:
        async with serving() as (server, client):
            seed = seed_with(range(300, 600))
            writing = asyncio.create_task(client.generate(PROMPT, Sampling(max_new_tokens=10_000), seed=seed))
            await until(lambda: server.decoding.running == 1)
            await client.give({client.urls[0]: commands.Command("/update_weight_version", keeping(1))})
            client.require(1)
            done = await writing
            assert done.parts == 1
            assert len(done.tokens) == response_length(seed)
            assert set(done.versions) == {0, 1} and done.versions == sorted(done.versions)
            assert set((await client.generate(PROMPT, Sampling(max_new_tokens=3), seed=1)).versions) == {1}

    asyncio.run(play())


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_what_a_pause_interrupts_goes_on(mode: commands.PauseMode) -> None:
    """Whether the client takes it up again (abort) or the engine does, the response is as long as it should be."""

    async def play() -> None:
        async with serving() as (server, client):
            seed = seed_with(range(300, 600))
            writing = asyncio.create_task(client.generate(PROMPT, Sampling(max_new_tokens=10_000), seed=seed))
            await until(lambda: server.decoding.running == 1)
            await asyncio.sleep(0.02)
            await client.everywhere(commands.pause(mode))
            assert (await client.health())[client.urls[0]] is not None
            await client.everywhere(commands.update_from_disk("anywhere", 1))
            await client.everywhere(commands.CONTINUE)
            done = await writing
            assert done.parts == (2 if mode == "abort" else 1)
            assert len(done.tokens) == response_length(seed)
            assert set(done.versions) == {0, 1} and done.finish_reason == "stop"

    asyncio.run(play())


def test_a_client_that_goes_away_frees_its_slot() -> None:
    async def play() -> None:
        async with serving(step_seconds=0.05, slots=1) as (server, client):
            long = asyncio.create_task(
                client.generate(PROMPT, Sampling(max_new_tokens=9999), seed=seed_with(range(900, 999)))
            )
            await until(lambda: server.decoding.running == 1)
            long.cancel()
            await until(lambda: server.decoding.running == 0)
            assert len((await client.generate(PROMPT, Sampling(max_new_tokens=1), seed=1)).tokens) == 1

    asyncio.run(play())


def test_what_it_cannot_make_sense_of_is_refused() -> None:
    async def play() -> None:
        async with serving() as (_, client):
            outcome = await client.give({client.urls[0]: commands.Command("/update_weight_version", {})})
            assert isinstance(outcome.failures[client.urls[0]], Refused)
            assert "new_version" in str(outcome.failures[client.urls[0]])

    asyncio.run(play())


def keeping(version: int) -> dict[str, object]:
    return {"new_version": str(version), "abort_all_requests": False}


async def until(holds: object) -> None:
    while not holds():  # type: ignore[operator]
        await asyncio.sleep(0.002)
