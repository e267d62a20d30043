"""Agents and keeper in one process, over a real queue."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshy.colocation.agent import Agent, Hooks
from meshy.colocation.columns import ring_declarations
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


def test_roles_take_turns(queue: LocalQueue, contract: Contract, tmp_path: Path) -> None:
    holder = Holder()
    keeper = RingKeeper("ring0", RULE, queue.endpoints, contract, tmp_path / "ring0.jsonl", lambda error: None)
    keeper.start()
    agents = {name: agent(queue, contract, holder, f"{name}.0", {}) for name in ("inference", "teacher", "trainer")}
    took: list[float] = []

    def work(name: str, times: int) -> None:
        for _ in range(times):
            with agents[name].gpu():
                assert holder.now == f"{name}.0"

    began = time.monotonic()
    threads = [threading.Thread(target=work, args=(name, 50)) for name in ("teacher", "trainer")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    took.append(time.monotonic() - began)
    print(took, agents["trainer"].numbers, agents["inference"].numbers)
    with agents["inference"].gpu():
        assert holder.now == "inference.0"
    for one in agents.values():
        one.close()
    keeper.close()
    print((tmp_path / "ring0.jsonl").read_text()[-600:])
