"""Agents and keeper in one process, over a real queue."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from meshy.colocation.agent import Agent, Hooks
from meshy.colocation.books import Books
from meshy.colocation.columns import ring_declarations
from meshy.colocation.keeping import RingKeeper
from meshy.colocation.turns import Ledger, Rule
from meshy.columns import Contract
from meshy.contract import derive_contract
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


@pytest.fixture
def queue(contract: Contract) -> Iterator[LocalQueue]:
    with local_queue(contract) as queue:
        yield queue


class Holder:
    """Whoever has the GPUs, by its own account."""

    def __init__(self) -> None:
        self.now: str | None = None
        self.events: list[tuple[str, str]] = []
        self.failures: list[BaseException] = []

    def take(self, name: str) -> None:
        assert self.now is None, f"{name} takes what {self.now} has"
        self.now = name
        self.events.append((name, "restore"))

    def use(self, name: str) -> None:
        """Nothing is restored before the first use."""
        if name not in [who for who, _ in self.events]:
            self.take(name)
        assert self.now == name

    def free(self, name: str) -> None:
        assert self.now == name
        self.now = None
        self.events.append((name, "free"))


def agent(queue: LocalQueue, contract: Contract, holder: Holder, replica: str) -> Agent:
    hooks = Hooks(
        free=lambda: holder.free(replica),
        restore=lambda payload: holder.take(replica),
        payload=dict,
        failed=holder.failures.append,
    )
    one = Agent("ring0", RULE, replica, secrets.token_hex(4), hooks, queue.endpoints, contract)
    one.start()
    return one


@pytest.fixture
def agents(queue: LocalQueue, contract: Contract, tmp_path: Path) -> Iterator[tuple[Holder, dict[str, Agent]]]:
    holder = Holder()
    keeper = RingKeeper("ring0", RULE, queue.endpoints, contract, tmp_path / "ring0.jsonl", lambda error: None)
    keeper.start()
    agents = {name: agent(queue, contract, holder, f"{name}.0") for name, _ in RULE.members}
    yield holder, agents
    assert not holder.failures
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
                holder.use(f"{name}.0")
                while other not in {row.group for row in by_name[name].ledger.waiting} and not patient.is_set():
                    patient.wait(0.002)

    with ThreadPoolExecutor() as pool:
        busy = [pool.submit(work, *names) for names in (("teacher", "trainer"), ("trainer", "teacher"))]
        try:
            for _ in range(10):
                with by_name["inference"].gpu():
                    holder.use("inference.0")
        finally:
            patient.set()
        for one in busy:
            one.result(30)


def test_a_fallback_that_has_loaded_nothing_yet_holds_nothing(agents: tuple[Holder, dict[str, Agent]]) -> None:
    holder, by_name = agents
    for _ in range(3):
        with by_name["trainer"].gpu():
            holder.use("trainer.0")
    assert {who for who, _ in holder.events} == {"trainer.0"}
    assert by_name["inference"].numbers.turns == 0


def test_who_waits_to_be_wanted_hands_over_without_a_turn_of_the_fallback(
    agents: tuple[Holder, dict[str, Agent]],
) -> None:
    """As a teacher does, whose scores make the trainer's work."""
    holder, by_name = agents
    with by_name["inference"].gpu():
        holder.use("inference.0")
    done = threading.Event()

    def train() -> None:
        done.wait(30)
        with by_name["trainer"].gpu():
            holder.use("trainer.0")

    with ThreadPoolExecutor() as pool:
        training = pool.submit(train)
        with by_name["teacher"].gpu():
            holder.use("teacher.0")
            assert not by_name["teacher"].wanted(0.05)  # inference would have it, but no code there waits
            done.set()
            assert by_name["teacher"].wanted(30)
        training.result(30)
    taken = [who for who, what in holder.events if what == "restore"]
    assert taken[taken.index("teacher.0") + 1] == "trainer.0"


def test_a_first_use_that_fails_says_why_and_keeps_the_token(agents: tuple[Holder, dict[str, Agent]]) -> None:
    """Nobody knows what it has left on the GPUs."""
    holder, by_name = agents
    with pytest.raises(ValueError, match="no such model"), by_name["teacher"].gpu():
        raise ValueError("no such model")
    assert holder.events == []
    with ThreadPoolExecutor() as pool:
        other = pool.submit(by_name["trainer"].gpu().__enter__)
        while not by_name["teacher"].ledger.waiting:
            assert not other.done()
        assert by_name["teacher"].ledger.holder == "teacher"
        by_name["trainer"].failed(RuntimeError("the test is over"))
        with pytest.raises(RuntimeError, match="agent of ring"):
            other.result(30)
    holder.failures.clear()


def test_whatever_breaks_on_the_agents_thread_ends_it(agents: tuple[Holder, dict[str, Agent]]) -> None:
    holder, by_name = agents
    by_name["trainer"].post(by_name["trainer"].member.restored)  # out of order
    with pytest.raises(RuntimeError, match="agent of ring"), by_name["trainer"].gpu():
        pass
    assert isinstance(holder.failures.pop(), AssertionError)


def test_closing_waits_for_no_request(contract: Contract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the queue does not answer any more; a request has half a minute for that."""
    looking = {"inference.0": threading.Event(), "keeper-ring0.0": threading.Event()}
    look = Books.look

    async def noted(books: Books) -> Ledger:
        under_way = looking[books._client.caller]  # type: ignore[attr-defined]
        under_way.set()
        seen = await look(books)
        under_way.clear()
        return seen

    monkeypatch.setattr(Books, "look", noted)
    failures: list[BaseException] = []
    holder = Holder()
    with local_queue(contract) as queue:
        keeper = RingKeeper("ring0", RULE, queue.endpoints, contract, tmp_path / "ring0.jsonl", failures.append)
        keeper.start()
        one = agent(queue, contract, holder, "inference.0")
        with one.gpu():
            holder.use("inference.0")
        parts = [psutil.Process(process.pid) for process in set(queue.processes.values())]
        parts += [child for part in parts for child in part.children(recursive=True)]
        for part in parts:
            part.suspend()
        try:
            for follower, under_way in zip((one, keeper), looking.values(), strict=True):
                under_way.wait()
                follower.close()
                assert not follower._thread.is_alive()  # type: ignore[attr-defined]
        finally:
            for part in parts:
                part.kill()
    assert not failures
    assert json.loads((tmp_path / "ring0.jsonl").read_text())["holder"] == "inference"
