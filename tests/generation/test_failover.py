"""Servers that die, hang, restart with older weights, or talk nonsense: no request is lost, none is answered by weights
older than required."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import pytest

from meshy.generation import GenerationClient, GenerationError, ReplicaError, commands, keeper
from meshy.recipe import Sampling
from tests.generation.conftest import OPTIONS
from tests.generation.orders import load_of, publish_from_disk
from tests.generation.test_client import LONG, PROMPT, client_of, run, running
from tests.inference.models import serve

SHORT = Sampling(max_new_tokens=5)


def port_of(url: str) -> str:
    return url.rpartition(":")[2]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def start(client: GenerationClient, count: int, **options) -> list[asyncio.Task]:
    return [asyncio.create_task(client.generate(PROMPT, LONG, seed=seed, **options)) for seed in range(count)]


async def load(url: str, folder: Path, version: int) -> None:
    """As the trainer does: its client is another one."""
    async with GenerationClient([url]) as trainer:
        await publish_from_disk(trainer, folder, version)


@contextmanager
def answering(answer: bytes, content_type: str = "application/json") -> Iterator[str]:
    """The URL of a server that says which weights it has, and gives that answer to all else."""
    stop: list[Callable[[], None]] = []
    ready: list[str] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")), 0)
        await reader.readexactly(length)
        body = json.dumps({"weight_version": "0"}).encode() if "/model_info" in head else answer
        fields = f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\nconnection: close"
        writer.write(f"HTTP/1.1 200 OK\r\n{fields}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    async def main() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            stop.append(lambda: loop.call_soon_threadsafe(ended.set))
            ready.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            started.set()
            await ended.wait()

    started = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    started.wait(10)
    yield ready[0]
    stop[0]()
    thread.join(10)


@pytest.fixture
def own(folders: tuple[Path, Path]) -> Iterator[tuple[str, Popen[str]]]:
    """A server of the first weights, as version 0, that the test may do anything to."""
    with serve(folders[0], *OPTIONS) as server:
        yield server


@pytest.mark.e2e
def test_a_killed_server_loses_nothing(replicas, own, caplog):
    """One of two servers is killed under load: its requests are written by the other one, from their beginning."""
    doomed, process = own

    async def work():
        async with client_of([replicas[0], doomed]) as client:
            client.require(0)
            expected = await asyncio.gather(*start(client, 6))
            jobs = start(client, 6)
            await running(client, doomed)
            process.kill()
            done = await asyncio.gather(*jobs)
            assert [one.tokens for one in done] == [one.tokens for one in expected]
            assert {one.replica for one in done} == {replicas[0]}
            assert {version for one in done for version in one.versions} == {0}
            assert client.rotation.fit == (replicas[0],) and client.numbers[doomed].failures == 1
            assert client.numbers[doomed].retries == 3 and client.balance.in_flight == {replicas[0]: 0, doomed: 0}
            health = await client.health()
            assert health[replicas[0]] is None and "could not be reached" in health[doomed]
            with pytest.raises(ReplicaError, match="failed on 1 of 2") as caught:
                await client.everywhere(commands.MODEL_INFO)
            assert caught.value.failures.keys() == {doomed}

    with caplog.at_level(logging.WARNING, "meshy.generation"):
        run(work)
    assert caplog.text.count("out of rotation") == 1


@pytest.mark.prove
@pytest.mark.e2e
def test_the_only_server_is_killed_and_restarts_with_older_weights(own, folders, caplog):
    """Its requests wait until it serves what is required again, and are then written as they would have been."""
    url, process = own

    async def work():
        async with client_of([url]) as client:
            await load(url, folders[1], 1)
            client.require(1)
            expected = await asyncio.gather(*start(client, 3))
            jobs = start(client, 3)
            await running(client, url)
            process.kill()
            await asyncio.to_thread(process.wait)
            await until(lambda: not client.rotation.fit)
            with pytest.raises(GenerationError, match=rf"within 0 s and 0 attempts.*out of rotation: {url}.*reached"):
                client.deadline = 0.2
                await client.generate(PROMPT, SHORT)
            with serve(folders[0], *OPTIONS, "--port", port_of(url)):
                await until(lambda: "v0, v1 is required" in str(client.rotation.reasons()))
                assert not any(job.done() for job in jobs)
                await load(url, folders[1], 1)
                done = await asyncio.gather(*jobs)
            assert [one.tokens for one in done] == [one.tokens for one in expected]
            assert all(set(one.versions) == {1} for one in done)
            assert client.rotation.seconds_out(url) > 0 and not client.numbers[url].stale

    with caplog.at_level(logging.INFO, "meshy.generation"):
        run(work)
    assert "back in rotation" in caplog.text


def test_a_server_that_went_back_to_older_weights_unnoticed_gives_no_token(pristine, folders):
    """The client learns it from an answer, which it does not use."""

    async def work():
        async with client_of(pristine) as client:
            kept, gone_back = pristine
            await asyncio.gather(*(load(url, folders[1], 1) for url in pristine))
            client.require(1)
            expected = await asyncio.gather(*start(client, 4))
            assert {one.replica for one in expected} == {kept, gone_back}
            await load(gone_back, folders[0], 0)
            done = await asyncio.gather(*start(client, 4))
            assert [one.tokens for one in done] == [one.tokens for one in expected]
            assert {version for one in done for version in one.versions} == {1}
            assert client.rotation.fit == (kept,) and client.numbers[gone_back].stale >= 1
            await load(gone_back, folders[1], 1)
            await until(lambda: len(client.rotation.fit) == 2)
            assert {one.replica for one in await asyncio.gather(*start(client, 4))} == {kept, gone_back}

    run(work)


def test_a_replica_that_missed_an_update_is_out_until_it_has_it(pristine, folders):
    async def work():
        updated, behind = pristine
        async with client_of(pristine, deadline=60) as client:
            client.require(0)
            await client.everywhere(commands.pause("in_place"))
            early = start(client, 4, key="a")  # they may be written by any weights from version 0 on
            await until(lambda: sum(client.balance.in_flight.values()) == 4)
            await client.everywhere(commands.CONTINUE)
            await load(updated, folders[1], 1)
            client.require(1)
            jobs = start(client, 8)
            done = await asyncio.gather(*jobs)
            assert {version for one in done for version in one.versions} == {1}
            assert {one.replica for one in done} == {updated}
            await until(lambda: client.rotation.is_out(behind))
            assert "v0, v1 is required" in client.rotation.reasons()[0]
            assert all(one.parts == 1 for one in await asyncio.gather(*early))  # nobody disturbed those
            await load(behind, folders[1], 1)
            await until(lambda: len(client.rotation.fit) == 2)
            assert {one.replica for one in await asyncio.gather(*start(client, 4))} == set(pristine)

    run(work)


@pytest.mark.prove
@pytest.mark.e2e
def test_what_newer_weights_began_is_not_continued_by_older_ones(pristine, own, folders):
    """A server with version 1 dies after a first part; version 0 would do for new requests, but not for that one."""
    older = pristine[0]
    newer, process = own

    async def work():
        async with client_of([newer, older]) as client, GenerationClient([newer]) as trainer:
            await load(newer, folders[1], 1)
            client.require(0)
            (job,) = start(client, 1)
            await running(client, newer)
            await trainer.everywhere(commands.pause("abort"))
            while not (await load_of(trainer, newer))["queues"]["paused"]:  # its second part
                await asyncio.sleep(0.005)
            process.kill()
            await until(lambda: client.rotation.is_out(older))
            assert not client.rotation.fit and client.numbers[older].stale == 1 and not job.done()
            await load(older, folders[1], 1)
            done = await job
            assert done.parts == 2 and set(done.versions) == {1} and done.replica == older

    run(work)


def test_requests_of_a_server_that_hangs_go_elsewhere_and_it_comes_back(processes, monkeypatch):
    monkeypatch.setattr(keeper, "ANSWER_SECONDS", 0.5)
    hanging, other = processes
    process = processes[hanging]

    async def work():
        async with client_of([hanging, other], silence=0.4) as client:
            expected = await asyncio.gather(*start(client, 4))
            jobs = start(client, 4)
            await running(client, hanging)
            os.kill(process.pid, signal.SIGSTOP)
            try:
                done = await asyncio.gather(*jobs)
                assert client.rotation.fit == (other,) and "did not answer" in client.rotation.reasons()[0]
            finally:
                os.kill(process.pid, signal.SIGCONT)
            assert [one.tokens for one in done] == [one.tokens for one in expected]
            assert {one.replica for one in done} == {other}
            await until(lambda: len(client.rotation.fit) == 2)
            assert {one.replica for one in await asyncio.gather(*start(client, 4))} == {hanging, other}

    run(work)


def test_a_busy_replica_is_not_taken_for_one_that_hangs(replicas):
    async def work():
        async with client_of(replicas[:1], silence=0.02) as client:
            done = await asyncio.gather(*start(client, 16))
            assert all(one.parts == 1 for one in done) and not client.numbers[replicas[0]].failures

    run(work)


@pytest.mark.parametrize(("answer", "kind"), [(b'{"text": "cut o', "application/json"), (b"\xff\xfe", "text/plain")])
def test_an_answer_that_is_cut_off_is_given_elsewhere(replicas, answer, kind):
    async def work():
        with answering(answer, kind) as broken:
            async with client_of([broken, replicas[0]]) as client:
                done = await asyncio.gather(*(client.generate(PROMPT, SHORT, key="k") for _ in range(4)))
                assert {one.replica for one in done} == {replicas[0]} and client.numbers[broken].failures >= 1

    run(work)


def test_an_answer_that_is_no_generation_says_who_gave_it():
    async def work():
        with answering(b'{"answer": 42}') as strange:
            async with client_of([strange]) as client:
                with pytest.raises(GenerationError, match=rf"{strange} gave an answer that is not SGLang's.*42"):
                    await client.generate(PROMPT, SHORT)

    run(work)
