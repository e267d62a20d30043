"""Three replicas of rollout, and a role of somebody's own that sees every gate too."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from meshy.queue.errors import QueueTimeout
from meshy.queue.sync import QueueClient
from meshy.recipe import Recipe, Sampling, ServiceGroup
from meshy.rollout.config import RolloutConfig
from meshy.service.context import queue_endpoints
from tests.rollout.play import DEADLINE, RUN_ID, Engine, Play, Trained, topology_of, trainer_of
from tests.rollout.roles import Watcher, recipe_of

pytestmark = pytest.mark.e2e


def three(**fields) -> Recipe:
    bound = fields.pop("max_staleness", None)
    config = RolloutConfig(**{"group_size": 2, "reward_workers": 1, "evaluate": False, "window": 16, **fields})
    watcher = ServiceGroup(id="watcher", config=Watcher())
    sampling = Sampling(temperature=100.0, max_new_tokens=12)
    return recipe_of(
        config, batch_size=10, steps=6, max_staleness=bound, sampling=sampling, replicas=3, also=(watcher,)
    )


@pytest.fixture(scope="module")
def play(base_port: int, engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    with trainer_of(topology_of(three(), base_port), engine, tmp_path_factory.mktemp("queue")) as trainer:
        yield Play(trainer, tmp_path_factory.mktemp("runs"))


def watched(play: Play, recipe: Recipe) -> tuple[Trained, list[tuple[int, int, bool]]]:
    """A run, and the gates (step, weight version, stop) as the watcher has seen them."""
    topology, gates, failures = play.trainer.topology, [], []

    def watch() -> None:
        try:
            with QueueClient(queue_endpoints(topology, RUN_ID), topology.contract, "watcher.0") as queue:
                while not gates or not gates[-1][-1]:
                    rows = queue.take("gen_gate", "watcher.0", timeout=DEADLINE)
                    columns = queue.read(rows)
                    seen = zip(
                        *(columns[name].tolist() for name in ("gate_step", "weight_version", "stop")), strict=True
                    )
                    gates.extend(sorted(seen))
                    queue.ack(rows)
        except QueueTimeout as error:
            failures.append(error)

    watcher = threading.Thread(target=watch)
    watcher.start()
    trained = play.run(recipe)
    watcher.join(DEADLINE)
    assert not failures and not watcher.is_alive()
    return trained, gates


@pytest.mark.parametrize(
    "pace",
    [
        {"window": 1},
        {"window": 2},
        {"window": 2, "over_sampling": 1.5},
        {"window": None, "max_staleness": 2},
        {"window": 2, "group_filter": "meshy.rollout.filters:varied_rewards"},
    ],
    ids=str,
)
def test_all_see_every_gate_and_share_what_is_to_be_done(play: Play, pace):
    recipe = three(**pace)
    trained, gates = watched(play, recipe)
    assert [step for step, _, _ in gates] == list(range(len(gates)))
    assert [stop for *_, stop in gates] == [False] * (len(gates) - 1) + [True]
    for service in trained.services:
        assert service.health()["gate_step"] == len(gates) - 1
        assert service.health()["groups_in_flight"] == 0 and service.rows_put > 0
    assert [len(batch["uid"]) for batch in trained.batches] == [10] * 6
    positions = [p for batch in trained.positions for p in batch]
    assert len(positions) == len(set(positions)) == 30
    assert sum(service.rows_put for service in trained.services) == 60 + trained.dropped
    bound = pace["max_staleness"] if pace["window"] is None else pace["window"] - 1
    for version, batch in enumerate(trained.versions):
        assert all(version - bound <= v for tokens in batch for v in tokens)
    if pace == {"window": 1} or pace == {"window": 2}:
        assert trained.positions == [list(range(5 * j, 5 * j + 5)) for j in range(6)]
    if pace["window"] is not None:
        assert len(gates) == 7 and [version for _, version, _ in gates] == list(range(7))
        for batch, mine in enumerate(trained.positions):  # each replica gives its share, lost groups or not
            planned = range(5 * batch, 5 * batch + 5)
            assert sorted(p % 3 for p in mine) == sorted(p % 3 for p in planned)


def test_one_of_them_evaluates(play: Play):
    trained, _ = watched(play, three(window=2, evaluate=True, eval_every=3))
    assert [row["weight_version"] for row in trained.evaluations] == [0, 3, 6]
