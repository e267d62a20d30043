"""The client against real servers: what it sends comes back whole, whatever happens to the servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time

import pytest

from meshy.generation import GenerationClient, GenerationError, ReplicaError
from meshy.generation.checksum import checksums
from meshy.inference.embedded.weights import checkpoint_files
from meshy.recipe import Sampling
from tests.generation.conftest import OPTIONS
from tests.inference.models import VOCAB, serve

PROMPT = [11, 12, 13, 14]
LONG = Sampling(max_new_tokens=400)


def run(work):
    """Run a coroutine function with a deadline of its own."""
    return asyncio.run(asyncio.wait_for(work(), 100))


def client_of(urls, **options):
    return GenerationClient(urls, vocab_size=VOCAB, **options)


async def running(client, url, at_least=1):
    """Until the replica runs requests."""
    while (await client.loads())[url]["num_running_reqs"] < at_least:
        await asyncio.sleep(0.002)


def test_generate_and_ask(replicas, folders):
    async def work():
        async with client_of(replicas) as client:
            done = await asyncio.gather(
                *(client.generate(PROMPT, Sampling(max_new_tokens=9), seed=3) for _ in range(4))
            )
            assert all(one.tokens == done[0].tokens and one.logprobs == done[0].logprobs for one in done)
            first = done[0]
            assert len(first.tokens) == len(first.logprobs) == len(first.versions) > 0 and set(first.versions) == {0}
            assert {one.replica for one in done} == set(replicas) and all(one.parts == 1 for one in done)
            assert first.finish_reason == "length"
            assert await client.health() == dict.fromkeys(replicas)
            assert await client.versions() == dict.fromkeys(replicas, 0)
            sums = await client.checksums()
            return sums

    from safetensors import safe_open

    sums = run(work)
    (file,) = checkpoint_files(folders[0])
    with safe_open(file, "pt") as source:
        expected = checksums((name, source.get_tensor(name)) for name in source.keys())  # noqa: SIM118
    assert sums == dict.fromkeys(replicas, expected)


def test_a_group_goes_to_one_replica(replicas):
    async def work():
        async with client_of(replicas) as client:
            jobs = [
                (key, client.generate(PROMPT, Sampling(max_new_tokens=40), key=key)) for key in "ab" for _ in range(6)
            ]
            done = await asyncio.gather(*(job for _, job in jobs))
            places = {(key, one.replica) for (key, _), one in zip(jobs, done, strict=True)}
            assert len(places) == 2 and {url for _, url in places} == set(replicas)
            assert client.balance.load == dict.fromkeys(replicas, 0)

    run(work)


def test_requests_in_flight_are_bounded(replicas):
    async def work():
        async with client_of(replicas, max_in_flight=3) as client:
            seen = []
            jobs = [asyncio.create_task(client.generate(PROMPT, Sampling(max_new_tokens=20))) for _ in range(12)]
            while not all(job.done() for job in jobs):
                seen.append(sum(client.balance.load.values()))
                await asyncio.sleep(0)
            assert max(seen) == 3

    run(work)


def test_new_weights_reach_all_replicas_and_requests_go_on(pristine, folders):
    async def work():
        async with client_of(pristine) as client:
            jobs = [asyncio.create_task(client.generate(PROMPT, LONG, seed=seed)) for seed in range(8)]
            for url in pristine:
                await running(client, url)
            await client.publish_from_disk(folders[1], 1)
            assert await client.versions() == dict.fromkeys(pristine, 1)
            done = await asyncio.gather(*jobs)
            for one in done:
                assert one.versions == sorted(one.versions) and set(one.versions) <= {0, 1}
                assert one.parts == 1 and len(one.tokens) == len(one.versions)
            await client.publish_from_disk(folders[0], 2, drain=True)
            assert set((await client.generate(PROMPT, Sampling(max_new_tokens=3))).versions) == {2}

    run(work)


def test_an_aborted_generation_is_resumed_and_writes_the_same(pristine):
    async def work():
        async with client_of(pristine[:1]) as client:
            expected = await client.generate(PROMPT, LONG, seed=21)
            (url,) = client.urls
            job = asyncio.create_task(client.generate(PROMPT, LONG, seed=21))
            interruptions = 0
            while not job.done() and interruptions < 3:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(running(client, url), 1)
                await client.pause("abort")
                await client.continue_()
                interruptions += 1
            done = await job
            assert (done.tokens, done.finish_reason) == (expected.tokens, expected.finish_reason)
            assert done.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
            assert done.parts > 1 and done.versions == [0] * len(done.tokens)

    run(work)


def test_a_request_that_comes_during_a_pause_waits_for_its_end(pristine):
    async def work():
        async with client_of(pristine[:1]) as client:
            (url,) = client.urls
            await client.pause("retract")
            assert "503" in (await client.health())[url]
            job = asyncio.create_task(client.generate(PROMPT, Sampling(max_new_tokens=2)))
            while not (await client.loads())[url]["queues"]["paused"]:
                await asyncio.sleep(0.005)
            assert not job.done()
            await client.continue_()
            assert (await job).parts == 1

    run(work)


def test_a_cancelled_request_gives_its_slot_back(replicas):
    async def work():
        async with client_of(replicas[:1]) as client:
            (url,) = client.urls
            await client.pause("retract")
            job = asyncio.create_task(client.generate(PROMPT, LONG))
            while not (await client.loads())[url]["queues"]["paused"]:
                await asyncio.sleep(0.005)
            job.cancel()
            with pytest.raises(asyncio.CancelledError):
                await job
            while (await client.loads())[url]["queues"]["paused"]:
                await asyncio.sleep(0.005)
            await client.continue_()
            assert client.balance.load == {url: 0}

    run(work)


@pytest.mark.e2e
def test_a_killed_server_loses_nothing(replicas, folders, caplog):
    """One of two servers is killed under load: its requests are written by the other one, from their beginning."""

    async def work(doomed, process):
        async with client_of([replicas[0], doomed]) as client:
            expected = await asyncio.gather(*(client.generate(PROMPT, LONG, seed=seed) for seed in range(6)))
            jobs = [asyncio.create_task(client.generate(PROMPT, LONG, seed=seed)) for seed in range(6)]
            await running(client, doomed)
            process.kill()
            done = await asyncio.gather(*jobs)
            assert [one.tokens for one in done] == [one.tokens for one in expected]
            assert {one.replica for one in done} == {replicas[0]}
            assert (await client.health())[replicas[0]] is None and "could not be reached" in (await client.health())[
                doomed
            ]
            with pytest.raises(ReplicaError, match="failed on 1 of 2") as caught:
                await client.model_info()
            assert caught.value.failures.keys() == {doomed}

    with caplog.at_level(logging.WARNING, "meshy.generation"), serve(folders[0], *OPTIONS) as (url, process):
        run(lambda: work(url, process))
    assert "trying again" in caplog.text


@pytest.mark.e2e
def test_a_restarted_server_takes_its_requests_up_again(folders):
    """The only server is killed, and another one starts on its port."""

    async def work():
        with serve(folders[0], *OPTIONS) as (url, process):
            async with client_of([url]) as client:
                expected = await client.generate(PROMPT, LONG, seed=5)
                job = asyncio.create_task(client.generate(PROMPT, LONG, seed=5))
                await running(client, url)
                process.kill()
                await asyncio.to_thread(process.wait)
                with serve(folders[0], *OPTIONS, "--port", url.rpartition(":")[2]):
                    assert (await job).tokens == expected.tokens

    run(work)


def test_with_no_server_the_deadline_ends_it():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"

        async def work():
            async with client_of([url], deadline=0.6) as client:
                start = time.monotonic()
                with pytest.raises(
                    GenerationError, match=r"no generation within 1 s and \d+ attempts.*could not be reached"
                ):
                    await client.generate(PROMPT, LONG)
                assert time.monotonic() - start < 5
                with pytest.raises(ReplicaError, match="could not be reached"):
                    await client.wait_ready(0.2)

        run(work)


def test_what_the_server_refuses_is_not_tried_again(replicas):
    async def work():
        async with client_of(replicas) as client:
            with pytest.raises(GenerationError, match=f"token id {VOCAB}"):
                await client.generate([VOCAB], LONG)
            with pytest.raises(GenerationError, match=r"answered 400.*maximum context length"):
                await client.generate(PROMPT, Sampling(max_new_tokens=9999))
            with pytest.raises(ReplicaError, match="failed on 2 of 2") as caught:
                await client.update_weights_from_disk("/nowhere", 5)
            assert caught.value.failures.keys() == set(replicas)
            assert await client.versions() == dict.fromkeys(replicas, 0)

    run(work)
