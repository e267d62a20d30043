"""Replicas that are there but did not go through a publish to its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from meshy.training.weights.bracket import TORN
from meshy.training.weights.publisher import Publisher
from meshy.training.weights.watch import MOST_FAILED_LOADS
from tests.inference.models import build, call, serve
from tests.training.relay import Relay

pytestmark = pytest.mark.e2e

LOAD = "/update_weights_from_disk"
ASK = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("repair") / "model", "qwen3_grouped_untied")


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[tuple[str, str]]:
    with serve(folder) as (one, _), serve(folder) as (other, _):
        yield one, other


@pytest.fixture
def urls(servers: tuple[str, str]) -> tuple[str, str]:
    for url in servers:
        assert call(url, "/update_weight_version", {"new_version": "0"})[0] == 200
        assert call(url, "/continue_generation", {})[0] == 200
    return servers


@pytest.fixture
def slow(urls: tuple[str, str]) -> Iterator[Relay]:
    """Before the first server."""
    relay = Relay(int(urls[0].rpartition(":")[2]))
    yield relay
    relay.close()


@pytest.fixture
def publisher(urls: tuple[str, str], slow: Relay) -> Iterator[Publisher]:
    publisher = Publisher([slow.url, urls[1]], deadline=3.0)
    publisher.start(10)
    yield publisher
    publisher.close()


def test_a_replica_whose_answer_came_too_late_is_continued(
    publisher: Publisher, slow: Relay, urls: tuple[str, str], folder: Path
) -> None:
    """It serves the version by its own word, but stays paused until an update of it has come to its end."""
    both = [slow.url, urls[1]]
    slow.hold_up(LOAD)
    report = publisher.from_folder(1, both, folder)
    slow.let_pass()
    assert report.served == [urls[1]] and list(report.behind) == [slow.url]
    publisher.look(both)
    assert publisher.watch.served == dict.fromkeys(both, 1)
    assert publisher.watch.behind(1) == publisher.watch.late(1) == [slow.url]
    assert publisher.from_folder(1, [slow.url], folder).served == [slow.url]
    assert publisher.watch.behind(1) == []
    assert call(urls[0], "/generate", ASK)[0] == 200


def test_a_replica_that_hangs_while_loading_is_asked_ever_more_seldom(
    publisher: Publisher, slow: Relay, urls: tuple[str, str], folder: Path
) -> None:
    both = [slow.url, urls[1]]
    slow.hold_up(LOAD)
    for version in range(1, 1 + MOST_FAILED_LOADS):
        assert publisher.from_folder(version, both, folder).served == [urls[1]]
        publisher.look(both)
    assert publisher.watch.behind(version) == [slow.url] and publisher.watch.late(version) == []
    assert [publisher.watch.asked(version) for version in (3, 4)] == [[urls[1]], both]
    slow.let_pass()
    assert sorted(publisher.from_folder(4, both, folder).served) == sorted(both)
    assert publisher.watch.asked(5) == both


def test_a_replica_that_could_not_be_reached_has_a_clean_record(
    publisher: Publisher, slow: Relay, urls: tuple[str, str], folder: Path
) -> None:
    slow.hold_up(LOAD)
    publisher.from_folder(1, [slow.url], folder)
    assert publisher.watch.failed_loads[slow.url] == 1
    slow.hold_up("/model_info")
    publisher.look([slow.url])
    assert publisher.watch.failed_loads[slow.url] == 0


def test_weights_that_everybody_refuses_are_given_up(
    publisher: Publisher, slow: Relay, urls: tuple[str, str], folder: Path, tmp_path: Path
) -> None:
    """Each replica then says that its weights are good for nothing, until it has others."""
    both, bad = [slow.url, urls[1]], build(tmp_path / "other", "qwen3_full_tied")
    for _ in range(MOST_FAILED_LOADS):
        assert publisher.wait_for_one(1) == both
        assert publisher.from_folder(1, both, bad).served == []
        assert [call(url, "/model_info")[2]["weight_version"] for url in urls] == [str(TORN)] * 2
    assert publisher.wait_for_one(60) == []
    assert publisher.from_folder(2, both, folder).served == both
    assert call(urls[0], "/generate", ASK)[0] == 200
