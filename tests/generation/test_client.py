"""The client against real servers: what it sends comes back whole, whatever happens to the servers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import numpy as np
import pytest

from meshy.generation import GenerationClient, GenerationError, ReplicaError, commands
from meshy.generation.checksum import checksums
from meshy.inference.embedded.weights import checkpoint_files
from meshy.recipe import Sampling
from tests.generation.orders import load_of, publish_from_disk, versions
from tests.inference.models import VOCAB

PROMPT = [11, 12, 13, 14]
LONG = Sampling(max_new_tokens=400)


def run(work):
    """Run a coroutine function with a deadline of its own."""
    return asyncio.run(asyncio.wait_for(work(), 100))


def client_of(urls, **options):
    return GenerationClient(urls, vocab_size=VOCAB, **options)


async def running(client, url, at_least=1):
    """Until the replica runs requests."""
    while (await load_of(client, url))["num_running_reqs"] < at_least:
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
            assert await versions(client) == dict.fromkeys(replicas, 0)
            answers = await client.everywhere(commands.CHECKSUM)
            return {url: answer["ranks"][0]["checksums"] for url, answer in answers.items()}

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
        for bounds, most, most_each in (
            ({"max_in_flight_per_replica": 2}, 4, 2),
            ({"max_in_flight_per_replica": 1}, 2, 1),
        ):
            async with client_of(replicas, **bounds) as client:
                seen = []
                jobs = [asyncio.create_task(client.generate(PROMPT, Sampling(max_new_tokens=20))) for _ in range(12)]
                while not all(job.done() for job in jobs):
                    seen.append(tuple(client.balance.in_flight.values()))
                    await asyncio.sleep(0)
                assert max(map(sum, seen)) == most and max(map(max, seen)) == most_each
                done = [await job for job in jobs]
                assert {one.parts for one in done} == {1}
                assert client.balance.load == client.balance.in_flight == dict.fromkeys(replicas, 0)
                assert sum(numbers.tokens for numbers in client.numbers.values()) == sum(
                    len(one.tokens) for one in done
                )

    run(work)


def test_those_who_wait_for_a_place_go_in_order_and_may_leave(pristine):
    async def work():
        async with client_of(pristine[:1], max_in_flight_per_replica=1) as client:
            await client.everywhere(commands.pause("retract"))
            ended = []

            async def one(number):
                await client.generate(PROMPT, Sampling(max_new_tokens=2))
                ended.append(number)

            jobs = [asyncio.create_task(one(number)) for number in range(6)]
            while not client.balance.in_flight[client.urls[0]]:
                await asyncio.sleep(0)
            jobs[0].cancel()  # frees the place for 1, which leaves before it can take it
            await asyncio.wait([jobs[0]])
            jobs[1].cancel()
            jobs[3].cancel()
            await client.everywhere(commands.CONTINUE)
            await asyncio.wait(jobs)
            assert ended == [2, 4, 5]

    run(work)


def test_what_was_begun_and_what_is_urgent_go_before_those_that_wait(pristine):
    async def work():
        async with client_of(pristine[:1], max_in_flight_per_replica=1) as client:
            ended = []

            async def one(name, count=2, **how):
                done = await client.generate(PROMPT, Sampling(max_new_tokens=count), **how)
                ended.append((name, done.parts))

            jobs = [asyncio.create_task(one("long", 400))]
            while not client.balance.in_flight[client.urls[0]]:
                await asyncio.sleep(0)
            jobs += [asyncio.create_task(one(name)) for name in ("a", "b")]
            jobs.append(asyncio.create_task(one("held out", first=True)))
            await running(client, client.urls[0])
            await client.everywhere(commands.pause("abort"))
            await client.everywhere(commands.CONTINUE)
            await asyncio.wait(jobs)
            assert ended == [("long", 2), ("held out", 1), ("a", 1), ("b", 1)]

    run(work)


def test_numbers_of_each_replica_and_of_the_client_itself(replicas):
    async def work():
        async with client_of(replicas) as client:
            assert client.own_seconds() == 0
            done = await asyncio.gather(*(client.generate(PROMPT, Sampling(max_new_tokens=8)) for _ in range(4)))
            assert await client.queues() == dict.fromkeys(replicas, 0)
            for url in replicas:
                numbers = client.numbers[url]
                written = sum(len(one.tokens) for one in done if one.replica == url)
                assert (numbers.answers, numbers.tokens, numbers.prompt_tokens) == (2, written, 8)
                assert 0 <= numbers.cache_hit_rate <= 1 and numbers.tokens_per_second > 0 and numbers.in_flight == 0
                assert not numbers.retries + numbers.stale + numbers.failures and client.rotation.seconds_out(url) == 0
                assert numbers.to_json()["tokens"] == written
            assert client.own_seconds() > 0

    run(work)


def test_new_weights_reach_all_replicas_and_requests_go_on(pristine, folders):
    async def work():
        async with client_of(pristine) as client:
            jobs = [asyncio.create_task(client.generate(PROMPT, LONG, seed=seed)) for seed in range(8)]
            for url in pristine:
                await running(client, url)
            await publish_from_disk(client, folders[1], 1)
            assert await versions(client) == dict.fromkeys(pristine, 1)
            done = await asyncio.gather(*jobs)
            for one in done:
                assert one.versions == sorted(one.versions) and set(one.versions) <= {0, 1}
                assert one.parts == 1 and len(one.tokens) == len(one.versions)
            await publish_from_disk(client, folders[0], 2, drain=True)
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
                await client.everywhere(commands.pause("abort"))
                await client.everywhere(commands.CONTINUE)
                interruptions += 1
            done = await job
            assert (done.tokens, done.finish_reason) == (expected.tokens, expected.finish_reason)
            assert done.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
            assert done.parts > 1 and done.versions == [0] * len(done.tokens)

    run(work)


def check_candidates(one, count):
    """Some of the tokens that were sampled are candidates; of those the log-probs are the same."""
    ids, logprobs = one.candidates.ids, one.candidates.logprobs
    assert ids.shape == logprobs.shape == (len(one.tokens), count)
    assert (logprobs[:, 1:] <= logprobs[:, :-1]).all()
    where = ids == np.array(one.tokens)[:, None]
    assert where.any()
    own = np.broadcast_to(np.array(one.logprobs, dtype=np.float32)[:, None], where.shape)
    np.testing.assert_array_equal(logprobs[where], own[where])


def test_candidates_of_all_parts_are_joined(pristine):
    async def work():
        async with client_of(pristine[:1]) as client:
            (url,) = client.urls
            expected = await client.generate(PROMPT, LONG, seed=5, candidates=3)
            job = asyncio.create_task(client.generate(PROMPT, LONG, seed=5, candidates=3))
            for mode in ("abort", "retract", "abort"):
                with contextlib.suppress(TimeoutError):  # it may have ended
                    await asyncio.wait_for(running(client, url), 1)
                await client.everywhere(commands.pause(mode))
                await client.everywhere(commands.CONTINUE)
            done = await job
            assert done.parts > 1 and done.tokens == expected.tokens
            for one in (expected, done):
                check_candidates(one, 3)
            assert (done.candidates.ids == expected.candidates.ids).mean() > 0.99  # nearly equal ones may change places
            np.testing.assert_allclose(done.candidates.logprobs, expected.candidates.logprobs, atol=1e-5)
            assert (await client.generate(PROMPT, Sampling(max_new_tokens=3))).candidates is None
            with pytest.raises(GenerationError, match=f"{VOCAB + 1} candidates"):
                await client.generate(PROMPT, LONG, candidates=VOCAB + 1)
            everything = await client.generate(PROMPT, Sampling(max_new_tokens=3), candidates=VOCAB)
            assert np.exp(everything.candidates.logprobs).sum(axis=1) == pytest.approx(1, abs=1e-4)

    run(work)


def test_a_response_that_begins_anew_has_the_candidates_of_its_own_tokens(pristine, folders):
    async def work():
        async with client_of(pristine[:1], restart_interrupted=True) as client:
            (url,) = client.urls
            job = asyncio.create_task(client.generate(PROMPT, LONG, candidates=2))
            await running(client, url)
            await client.everywhere(commands.pause("retract"))
            await client.everywhere(commands.update_from_disk(folders[1], 1))
            await client.everywhere(commands.CONTINUE)
            done = await job
            assert set(done.versions) == {1} and client.numbers[url].retries == 1
            check_candidates(done, 2)

    run(work)


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_with_restart_interrupted_each_response_has_one_version_whatever_interrupts_it(pristine, folders, mode):
    async def work():
        async with client_of(pristine[:1], restart_interrupted=True) as client:
            (url,) = client.urls
            jobs = [asyncio.create_task(client.generate(PROMPT, Sampling(max_new_tokens=60))) for _ in range(6)]
            for version in (1, 2):
                await running(client, url)
                await client.everywhere(commands.pause(mode))
                await client.everywhere(commands.update_from_disk(folders[version % 2], version))
                await client.everywhere(commands.CONTINUE)
            done = await asyncio.gather(*jobs)
            assert all(len(set(one.versions)) == 1 for one in done)  # parts that were thrown away do not count
            assert all(len(one.tokens) == len(one.logprobs) == len(one.versions) > 0 for one in done)
            assert all((len(one.tokens) == 60) == (one.finish_reason == "length") for one in done)
            assert client.numbers[url].retries >= 1 and client.balance.load == {url: 0}

    run(work)


def test_a_request_that_comes_during_a_pause_waits_for_its_end(pristine):
    async def work():
        async with client_of(pristine[:1]) as client:
            (url,) = client.urls
            await client.everywhere(commands.pause("retract"))
            assert "503" in (await client.health())[url]
            job = asyncio.create_task(client.generate(PROMPT, Sampling(max_new_tokens=2)))
            while not (await load_of(client, url))["queues"]["paused"]:
                await asyncio.sleep(0.005)
            assert not job.done()
            await client.everywhere(commands.CONTINUE)
            assert (await job).parts == 1

    run(work)


def test_a_cancelled_request_gives_its_slot_back(replicas):
    async def work():
        async with client_of(replicas[:1]) as client:
            (url,) = client.urls
            await client.everywhere(commands.pause("retract"))
            job = asyncio.create_task(client.generate(PROMPT, LONG))
            while not (await load_of(client, url))["queues"]["paused"]:
                await asyncio.sleep(0.005)
            job.cancel()
            with pytest.raises(asyncio.CancelledError):
                await job
            while (await load_of(client, url))["queues"]["paused"]:
                await asyncio.sleep(0.005)
            await client.everywhere(commands.CONTINUE)
            assert client.balance.load == {url: 0}

    run(work)


def test_with_no_server_the_deadline_ends_it():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"

        async def work():
            async with client_of([url], deadline=0.6) as client:
                start = time.monotonic()
                with pytest.raises(
                    GenerationError,
                    match=rf"no generation within 1 s and 1 attempts.*out of rotation: {url}.*could not",
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
                await client.everywhere(commands.update_from_disk("/nowhere", 5))
            assert caught.value.failures.keys() == set(replicas)
            assert await versions(client) == dict.fromkeys(replicas, 0)

    run(work)
