"""The trainer as a service, on one rank and on two, over a real queue; the test plays rollout."""

from __future__ import annotations

import json
import os
import queue as queues
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from meshy.columns import GEN_GATE, TRAIN
from meshy.queue.local import free_ports, local_queue
from meshy.queue.sync import QueueClient
from meshy.training.schedule import learning_rate
from tests.training.arrivals import group_columns
from tests.training.data import make_samples
from tests.training.service_rank import BATCH, CASES, GROUP, PARTS, STEPS, recipe_of, topology_of
from tests.training.test_engine import relative

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
SECONDS = 150.0
OLD = 2  # groups of case "dropping" that are too old when batch 2 is due
GROUPS = BATCH // GROUP


def group_of(version: int, number: int, oldest: int | None = None) -> dict[str, Any]:
    """Group `number` of a batch, some of whose tokens are a version old; group 3 has nothing to learn from."""
    samples = list(make_samples(BATCH, seed=version).values())[GROUP * number : GROUP * (number + 1)]
    position = version * GROUPS + number + (1000 if oldest is not None else 0)
    versions = [max(0, version - (number % 2) * i) if oldest is None else oldest for i in range(GROUP)]
    return group_columns(position, GROUP) | {
        "tokens": [sample.tokens for sample in samples],
        "loss_mask": [sample.loss_mask for sample in samples],
        "rollout_logprobs": [sample.columns["rollout_logprobs"] for sample in samples],
        "token_versions": [
            torch.full((len(sample.tokens),), versions[i], dtype=torch.int32) for i, sample in enumerate(samples)
        ],
        "n_tokens": [len(sample.tokens) for sample in samples],
        "n_written": [int(sample.loss_mask.sum()) for sample in samples],
        "oldest_version": versions,
        "reward": [1.0 if number == 3 else float(i + number % 2) for i in range(GROUP)],
    }


class Rollout:
    def __init__(self, client: QueueClient, said: queues.SimpleQueue[str]) -> None:
        self.client, self.said = client, said
        self.gates: list[tuple[int, int, bool]] = []

    def gate(self) -> None:
        rows = self.client.take(GEN_GATE, "rollout.0", at_most=1, timeout=SECONDS)
        columns = self.client.read(rows)
        self.client.ack(rows)
        self.gates.append(tuple(columns[name][0] for name in ("weight_version", "samples_retired", "stop")))

    def put(self, columns: dict[str, Any]) -> None:
        self.client.put(TRAIN, columns)

    def wait_until_trained(self) -> None:
        assert self.said.get(timeout=SECONDS) == "trained", "a rank has ended"

    def play(self, case: str) -> None:
        self.gate()
        for version in range(STEPS):
            if case == "dropping" and version == 2:
                old = [group_of(version, number, oldest=0) | {"lost": [1] + [0] * (GROUP - 1)} for number in range(OLD)]
                self.put({name: [value for some in old for value in some[name]] for name in old[0]})  # at once
                self.gate()  # the credit
            order = (
                list(range(GROUPS))
                if case in ("by name", "streamed")
                else [(5 * i + 3) % GROUPS for i in range(GROUPS)]
            )
            for i, number in enumerate(order):
                self.put(group_of(version, number))
                if case == "streamed" and (i + 1) % (GROUPS // PARTS) == 0:
                    self.wait_until_trained()  # and only then the next part is put
            if case != "streamed":
                self.wait_until_trained()
            self.gate()


def run(folder: Path, world: int) -> dict[str, Any]:
    """Every case; what rollout saw of each."""
    contract = topology_of(recipe_of("", world), world).contract
    with local_queue(contract) as server:
        (folder / f"endpoints.{world}.json").write_text(json.dumps(server.endpoints.to_json()))
        (port,) = free_ports(1)
        logs = [folder / f"log.{world}.{rank}" for rank in range(world)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.training.service_rank", str(folder), str(rank), str(world), str(port)],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MESHY_DEVICE": "cpu"},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=log.open("w"),
                text=True,
            )
            for rank, log in enumerate(logs)
        ]
        said: queues.SimpleQueue[str] = queues.SimpleQueue()

        def listen() -> None:
            for line in ranks[0].stdout:
                if line == "trained\n":
                    said.put("trained")
            said.put("ended")

        threading.Thread(target=listen, daemon=True).start()
        seen = {}
        try:
            with QueueClient(server.endpoints, contract, "rollout.0") as client:
                for case in CASES:
                    rollout = Rollout(client, said)
                    rollout.play(case)
                    seen[case] = rollout.gates
                codes = [rank.wait(SECONDS) for rank in ranks]
                assert codes == [0] * world
                seen["rows left"] = client.table()[TRAIN]["rows"]
        except BaseException as error:
            for rank in ranks:
                rank.kill()
            raise AssertionError("\n".join(log.read_text()[-4000:] for log in logs)) from error
    return seen


@pytest.fixture(scope="module")
def played(models) -> Iterator[dict[int, dict[str, Any]]]:
    """By world size: what rollout saw, and of every case what rank 0 saved and each rank was told."""
    folder = models / "service"
    folder.mkdir()
    with ThreadPoolExecutor(2) as pool:
        seen = dict(zip((1, 2), pool.map(partial(run, folder), (1, 2)), strict=True))
    yield {
        world: {
            "seen": seen[world],
            **{
                case: torch.load(folder / f"{case}.{world}.pt")
                | {
                    "ranks": [
                        json.loads((folder / f"{case}.{world}.rank{rank}.json").read_text()) for rank in range(world)
                    ]
                }
                for case in CASES
            },
        }
        for world in (1, 2)
    }


def uids_of(version: int) -> list[str]:
    return [f"{version * GROUPS + number}.{i}" for number in range(GROUPS) for i in range(GROUP)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", [1, 2])
def test_every_row_is_trained_once_in_its_batch_by_one_rank(played, world, case):
    ranks = played[world][case]["ranks"]
    for version in range(STEPS):
        parts = [told for told in ranks[0]["trained"] if told["version"] == version]
        assert len(parts) == (PARTS if case == "streamed" else 1)
        told = [uid for part in parts for uid in part["uids"]]
        assert told == uids_of(version)  # parts came in the order of the data here
        mine = Counter(
            uid for rank in ranks for part in rank["trained"] if part["version"] == version for uid in part["mine"]
        )
        assert mine == Counter(told)
    assert played[world]["seen"]["rows left"] == 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", [1, 2])
def test_ranks_keep_nothing_and_had_their_rows_read_early(played, world, case):
    ranks = played[world][case]["ranks"]
    assert [rank["held"] for rank in ranks] == [0] * world
    for parts in zip(*(rank["trained"] for rank in ranks), strict=True):
        early = Counter(uid for part in parts for uid in part["early"])
        assert early == Counter(parts[0]["uids"])  # each was wanted by one rank before it was to be trained
        if case == "last":
            assert not any(part["early"] for part in parts[:-1])


def test_who_fetched_what_changes_no_gradient(played):
    reference = played[1]["by name"]
    for world in (1, 2):
        for case in ("by name", "least", "last"):
            result = played[world][case]
            assert len(result["gradients"]) == 2 * STEPS
            first = relative(result["gradients"][0], reference["gradients"][0])
            assert first < 1e-6, (world, case)
            for mine, other in zip(result["gradients"], reference["gradients"], strict=True):
                assert relative(mine, other) < 1e-3, (world, case)  # Adam makes much of little
            assert relative(result["weights"], reference["weights"]) < 1e-5, (world, case)
    moved = {uid for part in played[2]["last"]["ranks"][0]["trained"] for uid in part["mine"]}
    assert moved  # all had been fetched by rank 1


def test_streamed_parts_are_the_same_on_two_ranks(played):
    one, two = played[1]["streamed"], played[2]["streamed"]
    assert len(one["gradients"]) == len(two["gradients"]) == PARTS * STEPS
    assert relative(two["gradients"][0], one["gradients"][0]) < 1e-6
    assert relative(two["weights"], one["weights"]) < 1e-5
    assert relative(one["weights"], played[1]["by name"]["weights"]) > 1e-4  # four steps a batch it was, and not two
    for a, b in zip(one["steps"], two["steps"], strict=True):
        for name in ("reward_mean", "samples", "tokens", "prompts", "groups", "zero_variance_groups", "lr"):
            assert a[name] == b[name], name
        assert a["groups"] == GROUPS and a["zero_variance_groups"] == 1


@pytest.mark.parametrize("world", [1, 2])
def test_learning_rates_of_the_parts_follow_the_schedule(played, world):
    rates = [rate for told in played[world]["streamed"]["ranks"][-1]["trained"] for rate in told["rates"]]
    count = PARTS * STEPS
    assert rates == [learning_rate(i, peak=1e-3, total=count, schedule="linear", warmup=3) for i in range(count)]
    assert played[world]["streamed"]["steps"][-1]["lr"] == rates[-1] == 0.0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", [1, 2])
def test_ages_are_counted_over_all_ranks(played, world, case):
    for version, step in enumerate(played[world][case]["steps"]):
        ages: Counter[int] = Counter()
        for number in range(GROUPS):
            columns = group_of(version, number)
            for mask, versions in zip(columns["loss_mask"], columns["token_versions"], strict=True):
                ages.update((version - versions[mask]).tolist())
        total = sum(ages.values())
        shares = {name: value for name, value in step.items() if name.startswith("staleness/")}
        assert shares == pytest.approx({f"staleness/{age}": count / total for age, count in ages.items()})
        assert step["staleness_max"] == max(ages)


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_dropped_is_credited_at_once(played, world):
    assert played[world]["seen"]["dropping"] == [
        (0, 0, False), (1, BATCH, False), (2, 2 * BATCH, False),
        (2, 2 * BATCH + OLD * GROUP, False),  # before a row of batch 2 was put
        (3, 3 * BATCH + OLD * GROUP, True),
    ]  # fmt: skip
    assert [step["dropped"] for step in played[world]["dropping"]["steps"]] == [0, 0, OLD * GROUP]
    assert [step["lost"] for step in played[world]["dropping"]["steps"]] == [0, 0, OLD]  # what their groups told of
    assert [step["staleness_max"] for step in played[world]["dropping"]["steps"]] == [0, 1, 1]
