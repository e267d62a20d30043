"""Broadcasts between processes: they arrive, and end in time when somebody does not do their part."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch

from meshy.generation.update_group import GroupError, UpdateGroup, join, reach_store, serve_store

SIZE = 1 << 20
LONG = 60.0
# A rank beyond 0: says what becomes of each broadcast; a line on its input makes it take part in the next.
PEER = f"""
import sys, torch
from meshy.generation.update_group import GroupError, join, reach_store
port, rank, size, name = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
store = reach_store("127.0.0.1", port, size, 30)
group = join(store, rank=rank, world_size=size, name=name, backend="gloo", timeout=30)
print("joined", flush=True)
flat = torch.zeros({SIZE}, dtype=torch.uint8)
for line in sys.stdin:
    try:
        group.broadcast(flat, {LONG}).wait()
        print("got", flat[0].item(), flat[-1].item(), flush=True)
    except GroupError as error:
        print("failed", error, flush=True)
group.close()
print("left", flush=True)
"""


class Peer:
    def __init__(self, port: int, rank: int, size: int, name: str) -> None:
        command = [sys.executable, "-c", PEER, *map(str, (port, rank, size, name))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def takes_part(self) -> None:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        code = self.process.wait(30)
        self.process.stdout.close()
        return code


Meet = Callable[[str, int], tuple[UpdateGroup, list[Peer]]]


@pytest.fixture(scope="module")
def store():
    return serve_store("127.0.0.1", 0, 30)


@pytest.fixture
def meet(store) -> Iterator[Meet]:
    """A group of this process and some peers."""
    made: list[tuple[UpdateGroup, list[Peer]]] = []

    def make(name: str, peers: int) -> tuple[UpdateGroup, list[Peer]]:
        size = peers + 1
        started = [Peer(store.port, rank, size, name) for rank in range(1, size)]
        group = join(store, rank=0, world_size=size, name=name, backend="gloo", timeout=30)
        assert [peer.says() for peer in started] == ["joined"] * peers
        made.append((group, started))
        return group, started

    yield make
    for group, peers in made:
        group.close()
        for peer in peers:
            peer.process.send_signal(signal.SIGCONT)
            peer.close()


def filled(value: int) -> torch.Tensor:
    return torch.full((SIZE,), value, dtype=torch.uint8)


def seconds_until_failure(action: Callable[[], None]) -> float:
    began = time.monotonic()
    with pytest.raises(GroupError):
        action()
    return time.monotonic() - began


@pytest.mark.e2e
def test_what_rank_0_sends_arrives_and_when_it_leaves_nobody_waits(meet):
    group, peers = meet("all", 2)
    for value in (3, 4):
        for peer in peers:
            peer.takes_part()
        group.broadcast(filled(value), LONG).wait()
        assert [peer.says() for peer in peers] == [f"got {value} {value}"] * 2
    for peer in peers:
        peer.takes_part()
    group.close()
    group.close()
    assert all(peer.says().startswith("failed ") for peer in peers)
    with pytest.raises(GroupError, match="is closed"):
        group.broadcast(filled(0), LONG)
    assert [peer.close() for peer in peers] == [0, 0]


@pytest.mark.e2e
def test_a_peer_that_is_killed_or_hangs_ends_the_broadcast(meet):
    group, (peer, other) = meet("killed", 2)
    sent = group.broadcast(filled(1), LONG)
    peer.process.kill()
    assert seconds_until_failure(sent.wait) < LONG / 2
    group.close()
    other.takes_part()
    assert "failed" in other.says()
    # Another group of the same store, where one stops.
    group, (peer,) = meet("hangs", 1)
    peer.process.send_signal(signal.SIGSTOP)
    assert seconds_until_failure(group.broadcast(filled(1), 1.0).wait) < LONG / 2


@pytest.mark.e2e
def test_closing_while_a_broadcast_is_held_up_returns_at_once(meet):
    group, (peer,) = meet("held", 1)
    sent = group.broadcast(filled(1), 2.0)
    group.close()
    assert any(thread.name == "update-group-end" for thread in threading.enumerate())
    assert seconds_until_failure(sent.wait) < LONG / 2  # at its own deadline
    peer.takes_part()
    assert peer.says().startswith("failed The broadcast of 1048576 bytes in the update group 'held' (rank 1 of 2)")


def test_who_comes_alone_is_told_so(store):
    with pytest.raises(GroupError, match="Rank 0 of 2 could not join the update group 'alone' within 1 s"):
        join(store, rank=0, world_size=2, name="alone", backend="gloo", timeout=1)
    with pytest.raises(GroupError, match=r"can use the backends \['gloo', 'nccl'\], not 'mpi'"):
        join(store, rank=0, world_size=2, name="other", backend="mpi", timeout=1)


def test_a_port_in_use_and_one_where_nobody_listens(store):
    with pytest.raises(GroupError, match=rf"Cannot serve the store of the update group on 127.0.0.1:{store.port}: "):
        serve_store("127.0.0.1", store.port, 1)
    with pytest.raises(GroupError, match=r"Cannot reach the store of the update group on 127\.0\.0\.1:1: "):
        reach_store("127.0.0.1", 1, 2, 0.5)
