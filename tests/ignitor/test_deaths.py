"""Who is dead in a ring, when a dead process is gone, and how ignitors tell one another."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from meshy.ignitor.children import Buried, Children
from meshy.ignitor.deaths import Dead, Notices
from meshy.topology import Process, Replica


def replica(name: str, ranks: int) -> Replica:
    names = [name if rank == 0 else f"{name}.{rank}" for rank in range(ranks)]
    processes = tuple(Process(each, rank, "host", rank, (rank,), 0) for rank, each in enumerate(names))
    return Replica(name, name.partition(".")[0], 0, tuple(range(ranks)), "host", 0, 0, 0, "ring", processes)


def test_a_replica_is_dead_when_all_its_processes_are() -> None:
    dead = Dead([replica("trainer.0", 3), replica("inference.0", 1)])
    assert dead.ended("trainer.0", "leader's") is None
    assert dead.ended("trainer.0.2", "b") is None
    assert dead.ended("trainer.0", "leader's") is None, "the same death, told again"
    assert dead.ended("inference.0", "c") == ("inference.0", "c")
    assert dead.ended("trainer.0.1", "a") == ("trainer.0", "leader's")
    assert dead.ended("inference.0", "c") is None
    assert dead.ended("inference.0", "d") == ("inference.0", "d")


class Faltering(HashStore):
    """Fails each call of one kind so often as it is told to, before or after it is carried out."""

    failures: dict[str, list[str]]

    def _falter(self, call: str, when: str) -> None:
        if self.failures.get(call, [""])[0] == when:
            self.failures[call].pop(0)
            self.failures = {kind: left for kind, left in self.failures.items() if left}
            raise RuntimeError("the store is out for a moment")

    def _call(self, call: str, *arguments: Any) -> Any:
        self._falter(call, "before")
        result = getattr(super(), call)(*arguments)
        self._falter(call, "after")
        return result

    def set(self, *arguments: Any) -> Any:
        return self._call("set", *arguments)

    def add(self, *arguments: Any) -> Any:
        return self._call("add", *arguments)

    def get(self, *arguments: Any) -> Any:
        return self._call("get", *arguments)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", ["set", "add", "get"])
def test_a_call_of_the_store_that_fails_loses_no_death(call: str, when: str) -> None:
    store = Faltering()
    store.failures = {}
    there, here = Notices(1, store), Notices(0, store)
    there.add("ring", "inference.1", "a")
    there.say()
    assert list(here.hear("ring", [1, 2])) == [("inference.1", "a")]
    assert list(here.hear("ring", [1, 2])) == []
    store.failures = {call: [when]}
    there.add("ring", "inference.1", "b")
    heard: set[tuple[str, str]] = set()
    for _ in range(3):
        there.say()
        heard |= set(here.hear("ring", [1, 2]))
    assert not store.failures and ("inference.1", "b") in heard
    assert list(here.hear("ring", [1, 2])) == []


BEHIND = """
import fcntl, sys, time
held = b"x" * (200 << 20)
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""
LEAVES_IT = """
import subprocess, sys
behind = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdout=subprocess.PIPE, process_group=0)
behind.stdout.readline()
"""


def test_a_child_is_buried_when_nothing_of_its_session_is_left(tmp_path: Path) -> None:
    """Not when that was told to end: what has much memory needs a while, and has its files until after that."""
    children = Children()
    command = [sys.executable, "-c", LEAVES_IT, BEHIND, str(tmp_path / "lock")]
    child = children.spawn("a", command, tmp_path / "log", dict(os.environ))
    assert children.exits.get(timeout=30) is child
    with (tmp_path / "lock").open() as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        children.bury(child)
        assert children.exits.get(timeout=30) == Buried(child)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
