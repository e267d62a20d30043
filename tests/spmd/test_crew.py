"""The leader's line to its crew: threads stand for ranks, over real sockets; dying ranks are real processes."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

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


def test_a_rank_stuck_in_native_code_is_ended_with_the_other_ones_reason(tmp_path):
    program = """
import logging, sys, threading, time
from meshy.spmd.crew import Crew
logging.basicConfig(level=logging.INFO)
class Store:
    def get(self, key): return sys.stdin.readline().encode()
crew = Crew(1, 2, "127.0.0.1", Store())
print("joined", flush=True)
threading.Lock().acquire(); lock = threading.Lock(); lock.acquire(); lock.acquire()
"""
    store = Store()
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(Crew, 0, 2, "127.0.0.1", store, on_loss=lambda why: None)
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            process.stdin.write(store.get("crew").decode() + "\n")
            process.stdin.flush()
            leader = leading.result(timeout=20)
            assert process.stdout.readline() == "joined\n"
            started = time.monotonic()
            leader.fail("ValueError: what went wrong")
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == LOST and "rank 0 failed: ValueError: what went wrong" in errors
    assert time.monotonic() - started < 10
