"""The leader's line to its crew: threads stand for ranks, over real sockets; dying ranks are real processes."""

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from meshy.spmd import crew as module
from meshy.spmd.crew import LOST, Crew


class Store:
    """What a TCPStore does: `get` waits until the key is set."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, timeout=10)
            return self._values[key]


@pytest.fixture
def crew():
    """Makes a crew of n; `losses` holds (rank, reason) of every loss that a rank noticed."""
    made: list[Crew] = []

    def make(count: int):
        store, losses = Store(), []
        noticed = threading.Semaphore(0)

        def join(rank: int) -> Crew:
            def on_loss(why: str) -> None:
                losses.append((rank, why))
                noticed.release()

            return Crew(rank, count, "127.0.0.1", store, on_loss=on_loss)

        with ThreadPoolExecutor(count) as pool:
            made.extend(pool.map(join, range(count)))
        return made, losses, noticed

    yield make
    for member in made:
        member.close()


def test_commands_arrive_everywhere_in_order(crew):
    (leader, *others), losses, _ = crew(4)
    for number in range(50):
        leader.send({"number": number, "payload": b"x" * 100_000})
    for other in others:
        assert [other.receive()["number"] for _ in range(50)] == list(range(50))
    assert not losses


def test_a_crew_of_one_needs_no_line(crew):
    (leader,), losses, _ = crew(1)
    leader.send("anything")
    leader.fail("alone")
    assert not losses


def test_a_failing_rank_gives_its_reason_to_all(crew):
    members, losses, noticed = crew(3)
    members[2].fail("Traceback: ValueError: bad row")
    for _ in range(2):
        assert noticed.acquire(timeout=10)
    assert sorted(losses) == [(rank, "rank 2 failed: Traceback: ValueError: bad row") for rank in (0, 1)]


def test_a_rank_that_vanishes_is_noticed_by_all(crew):
    members, losses, noticed = crew(3)
    members[1]._sockets[0].shutdown(2)  # as the kernel does when its process is killed
    for _ in range(3):  # rank 1, which is alive here, sees the end of its line too
        assert noticed.acquire(timeout=10)
    assert {rank for rank, why in losses if why.startswith("rank 1 is gone")} == {0, 2}


def test_an_orderly_end_is_no_loss(crew):
    members, losses, noticed = crew(3)
    for member in (members[1], members[0], members[2]):
        member.close()
        for connection in member._sockets.values():
            with suppress(OSError):  # the other end may be gone already
                connection.shutdown(2)
    assert not noticed.acquire(timeout=0.2) and not losses


def test_a_stranger_on_the_line_is_turned_away(crew, monkeypatch):
    join = module._join

    def stranger_first(rank, store):
        host, port, secret = store.get("crew").decode().split()
        with module.socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"0" * len(secret) + module.struct.pack("!I", 1))
            assert connection.recv(1) == b""
        return join(rank, store)

    monkeypatch.setattr(module, "_join", stranger_first)
    (leader, other), losses, _ = crew(2)
    leader.send("hello")
    assert other.receive() == "hello" and not losses


OTHER_RANK = """
import logging, queue, sys, threading
from meshy.spmd.crew import Crew
logging.basicConfig(level=logging.INFO)
class Store:
    def get(self, key): return sys.stdin.readline().encode()
asides = queue.SimpleQueue()
def on_aside(order):
    if order == "fail": raise ValueError("no such rows")
    asides.put(order)
crew = Crew(1, 2, "127.0.0.1", Store(), on_aside=on_aside)
print("joined", flush=True)
"""
"""Of a process of its own. What follows it says what its main thread does."""


@contextmanager
def leading(program: str, **options: Any) -> Iterator[tuple[Crew, subprocess.Popen[str]]]:
    """The leader, here, of a process that has joined it."""
    store = Store()
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(Crew, 0, 2, "127.0.0.1", store, **options)
        process = subprocess.Popen(
            [sys.executable, "-c", OTHER_RANK + program],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            process.stdin.write(store.get("crew").decode() + "\n")
            process.stdin.flush()
            leader = leading.result(timeout=60)
            assert process.stdout.readline() == "joined\n"
            yield leader, process
        finally:
            process.kill()
            process.wait()


def test_an_order_aside_is_handled_while_the_main_thread_is_busy_with_a_command():
    program = """
assert crew.receive() == "work"
print("aside:", [asides.get(), asides.get()], flush=True)  # the command ends with what comes aside meanwhile
print("next:", crew.receive(), flush=True)
"""
    with leading(program) as (leader, process):
        leader.send("work")
        leader.send_aside({"rows": 3})
        leader.send("more")
        leader.send_aside({"rows": 4})
        assert process.stdout.readline() == "aside: [{'rows': 3}, {'rows': 4}]\n"
        assert process.stdout.readline() == "next: more\n"
        leader.close()


def test_orders_aside_and_commands_may_be_sent_from_several_threads():
    program = """
print([crew.receive() for _ in range(200)] == [b"c" * 1000 * (i % 50) for i in range(200)], flush=True)
print([asides.get() for _ in range(200)] == [b"a" * 1000 * (i % 50) for i in range(200)], flush=True)
"""
    with leading(program) as (leader, process), ThreadPoolExecutor(2) as pool:
        commands = pool.submit(lambda: [leader.send(b"c" * 1000 * (i % 50)) for i in range(200)])
        asides = pool.submit(lambda: [leader.send_aside(b"a" * 1000 * (i % 50)) for i in range(200)])
        assert commands.result(60) and asides.result(60)
        assert [process.stdout.readline() for _ in range(2)] == ["True\n"] * 2
        leader.close()


def test_a_rank_that_fails_aside_ends_although_its_main_thread_is_busy():
    losses: queue.SimpleQueue[str] = queue.SimpleQueue()
    with leading("threading.Event().wait()", on_loss=losses.put) as (leader, process):
        leader.send_aside("fail")
        why = losses.get(timeout=60)
        assert why.startswith("rank 1 failed: Traceback") and "ValueError: no such rows" in why
        _, errors = process.communicate(timeout=60)
        assert process.returncode == LOST and "ValueError: no such rows" in errors


def test_a_rank_stuck_in_native_code_is_ended_with_the_other_ones_reason():
    program = "lock = threading.Lock(); lock.acquire(); lock.acquire()"
    with leading(program, on_loss=lambda why: None) as (leader, process):
        started = time.monotonic()
        leader.fail("ValueError: what went wrong")
        _, errors = process.communicate(timeout=60)
    assert process.returncode == LOST and "rank 0 failed: ValueError: what went wrong" in errors
    assert time.monotonic() - started < 10
