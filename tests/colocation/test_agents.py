"""Agents and keeper in one process, over a real queue."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from meshy.colocation.agent import Agent, Hooks
from meshy.colocation.books import Books
from meshy.colocation.columns import ring_declarations
from meshy.colocation.follower import Follower
from meshy.colocation.keeping import RingKeeper
from meshy.colocation.turns import Rule
from meshy.columns import Contract, derive_contract
from meshy.queue.local import LocalQueue, local_queue
from meshy.recipe import FALLBACK, ON_DEMAND

RULE = Rule((("inference", FALLBACK), ("teacher", ON_DEMAND), ("trainer", ON_DEMAND)))


@pytest.fixture(scope="module")
def contract() -> Contract:
    contract, faults = derive_contract(
        ring_declarations("ring0", dict.fromkeys(("inference", "teacher", "trainer"), 1))
    )
    assert not faults
    return contract


@pytest.fixture(scope="module")
def queue(contract: Contract) -> Iterator[LocalQueue]:
    with local_queue(contract) as queue:
        yield queue


class Holder:
    """Whoever has the GPUs, by its own account."""

    def __init__(self) -> None:
        self.now: str | None = None
        self.events: list[tuple[str, str]] = []

    def take(self, name: str) -> None:
        assert self.now is None, f"{name} takes what {self.now} has"
        self.now = name
        self.events.append((name, "restore"))

    def free(self, name: str) -> None:
        assert self.now == name
        self.now = None
        self.events.append((name, "free"))


def agent(queue: LocalQueue, contract: Contract, holder: Holder, replica: str, payload: dict[str, Any]) -> Agent:
    failures: list[BaseException] = []
    hooks = Hooks(
        free=lambda: holder.free(replica),
        restore=lambda payload: holder.take(replica),
        payload=lambda: payload,
        failed=failures.append,
    )
    one = Agent("ring0", RULE, replica, secrets.token_hex(4), hooks, queue.endpoints, contract)
    one._loaded = True  # type: ignore[attr-defined]
    one.start()
    return one


@pytest.fixture
def agents(queue: LocalQueue, contract: Contract, tmp_path: Path) -> Iterator[tuple[Holder, dict[str, Agent]]]:
    holder = Holder()
    keeper = RingKeeper("ring0", RULE, queue.endpoints, contract, tmp_path / "ring0.jsonl", lambda error: None)
    keeper.start()
    agents = {name: agent(queue, contract, holder, f"{name}.0", {}) for name, _ in RULE.members}
    yield holder, agents
    for one in agents.values():
        one.close()
    keeper.close()


def test_everybody_that_asks_is_let_in_alone(agents: tuple[Holder, dict[str, Agent]]) -> None:
    """FALLBACK's code too, while the two others always want the GPUs from one another."""
    holder, by_name = agents
    patient = threading.Event()

    def work(name: str, other: str) -> None:
        while not patient.is_set():
            with by_name[name].gpu():
                assert holder.now == f"{name}.0"
                while other not in {row.group for row in by_name[name].ledger.waiting} and not patient.is_set():
                    patient.wait(0.002)

    with ThreadPoolExecutor() as pool:
        busy = [pool.submit(work, *names) for names in (("teacher", "trainer"), ("trainer", "teacher"))]
        try:
            for _ in range(10):
                with by_name["inference"].gpu():
                    assert holder.now == "inference.0"
        finally:
            patient.set()
        for one in busy:
            one.result(30)


def looking(follower: Follower) -> threading.Event:
    """Set while it looks at the ledger, and carries out what it decides then."""
    looks, step = threading.Event(), follower.step

    async def noted(books: Books) -> bool:
        looks.set()
        did = await step(books)
        looks.clear()
        return did

    follower.step = noted  # type: ignore[method-assign]
    return looks


def test_closing_waits_for_no_request(contract: Contract, tmp_path: Path) -> None:
    """Here the queue does not answer any more; a request has half a minute for that."""
    failures: list[BaseException] = []
    holder = Holder()
    with local_queue(contract) as queue:
        keeper = RingKeeper("ring0", RULE, queue.endpoints, contract, tmp_path / "ring0.jsonl", failures.append)
        keeper.start()
        one = agent(queue, contract, holder, "inference.0", {})
        while holder.now is None:
            threading.Event().wait(0.01)
        parts = [psutil.Process(process.pid) for process in set(queue.processes.values())]
        parts += [child for part in parts for child in part.children(recursive=True)]
        followers = [(one, looking(one)), (keeper, looking(keeper))]
        for part in parts:
            part.suspend()
        try:
            for follower, look in followers:
                look.wait()
                follower.close()
                assert not follower._thread.is_alive()  # type: ignore[attr-defined]
        finally:
            for part in parts:
                part.kill()
    assert not failures
    assert json.loads((tmp_path / "ring0.jsonl").read_text())["holder"] == "inference"
