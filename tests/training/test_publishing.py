"""Weights on their way to inference: real trainer ranks, real servers, requests in flight all the time."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from meshy.observe.runfolder import versions_in
from tests.inference.models import build, call
from tests.training.stage import Load, Stage, stage

pytestmark = pytest.mark.e2e

MODES = ("disk", "shm", "collective")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("publishing") / "model", "qwen3_grouped_untied")


def publish_under_load(on: Stage, versions: int) -> Load:
    """Versions 1 ... n, each with its gate, while requests are in flight; every checksum is compared each time."""
    load = Load(on.urls)
    try:
        for version in range(1, versions + 1):
            said = on.trainer.order("publish", version=version)
            assert sorted(said["served"]) == sorted(on.urls) and not said["behind"], said
            load.require(version)
            assert on.trainer.order("after_gate", version=version, last=version == versions) == {"behind": []}
    finally:
        load.stop()
    load.check()
    return load


def test_versions_travel_each_way_under_load(model: Path, tmp_path: Path) -> None:
    with stage(tmp_path, model, publish="disk", verify_every=1, write_every=2) as on:
        for mode in MODES:
            for url in on.urls:
                assert call(url, "/update_weight_version", {"new_version": "0"})[0] == 200
            assert on.trainer.order("use", publish=mode) == {"behind": []}
            load = publish_under_load(on, 3)
            assert any(len(set(asked.completion.versions)) > 1 for asked in load.asked), "no request was in flight"
            assert versions_in(tmp_path / "run" / "weights")[-1] == 3
        on.trainer.tell("spoil", version=4)
        assert all(process.wait(30) != 0 for process in on.trainer.processes)
        said = on.trainer.log.read_text()
    assert "replicas hold other weights than the trainer" in said
    assert all(f"{url}: 25 tensors, lm_head.weight, model.embed_tokens.weight" in said for url in on.urls)


@pytest.mark.prove
@pytest.mark.parametrize("mode", MODES)
def test_fifty_versions_under_load(mode: str, model: Path, tmp_path: Path) -> None:
    with stage(tmp_path, model, publish=mode, verify_every=1) as on:
        load = publish_under_load(on, 50)
        assert on.trainer.end() == [0, 0]
    assert sum(len(set(asked.completion.versions)) > 1 for asked in load.asked) >= 50


@pytest.mark.prove
@pytest.mark.parametrize(
    ("in_flight", "shown"),
    [
        ("keep", lambda completion: len(set(completion.versions)) > 1),
        ("abort", lambda completion: completion.parts > 1),
    ],
    ids=["keep", "abort"],
)
@pytest.mark.parametrize("mode", MODES)
def test_requests_in_flight_go_on(mode: str, in_flight: str, shown: Any, model: Path, tmp_path: Path) -> None:
    """With the keys that they have, or, given back unfinished, as new requests."""
    with stage(tmp_path, model, publish=mode, publish_in_flight=in_flight, verify_every=1) as on:
        load = publish_under_load(on, 10)
        assert on.trainer.end() == [0, 0]
    assert any(shown(asked.completion) for asked in load.asked), "no request was in flight"


@pytest.mark.prove
@pytest.mark.parametrize("mode", MODES)
def test_requests_in_flight_are_drained_first(mode: str, model: Path, tmp_path: Path) -> None:
    """From disk none is interrupted; else only those that waited for the drain to end and begin before the pause."""
    with stage(tmp_path, model, publish=mode, publish_in_flight="drain", verify_every=1) as on:
        load = publish_under_load(on, 10)
        assert on.trainer.end() == [0, 0]
    spans = [len(set(asked.completion.versions)) for asked in load.asked]
    assert max(spans) == 1 if mode == "disk" else max(spans) <= 2
    assert sum(count == 2 for count in spans) <= 10 * load.in_flight


@pytest.mark.prove
@pytest.mark.parametrize("mode", MODES)
def test_a_replica_killed_in_the_middle_of_a_publish_is_brought_up_to_date(
    mode: str, model: Path, tmp_path: Path
) -> None:
    """Whenever it dies, the other one serves; a new process, which starts with old weights, is found and updated."""
    with stage(tmp_path, model, publish=mode, verify_every=1, weights_deadline=10.0, bucket_mb=1) as on:
        load = Load(on.urls)
        victim, other = on.servers
        for version in range(1, 7):
            on.trainer.tell("publish", version=version)
            time.sleep(0.015 * version)  # at another point of the publish each time
            victim.signal(signal.SIGKILL)
            said = on.trainer.answer()
            assert other.url in said["served"], said
            load.require(version)
            on.trainer.order("after_gate", version=version)
            victim.start(model, 0)
            assert on.trainer.order("wait_until_all_serve", seconds=20) == {"behind": []}
        said = on.trainer.order("publish", version=7)
        assert sorted(said["served"]) == sorted(on.urls)
        load.require(7)
        assert on.trainer.order("after_gate", version=7, last=True) == {"behind": []}  # compares checksums
        load.stop()
        load.check()
        assert on.trainer.end() == [0, 0]


@pytest.mark.prove
@pytest.mark.parametrize("mode", MODES)
def test_a_replica_that_hangs_holds_the_gate_up_for_no_longer_than_the_deadline(
    mode: str, model: Path, tmp_path: Path
) -> None:
    deadline = 8.0
    with stage(tmp_path, model, publish=mode, verify_every=1, weights_deadline=deadline) as on:
        load = Load(on.urls)
        for version, (victim, other) in enumerate((on.servers, on.servers[::-1]), start=1):
            victim.signal(signal.SIGSTOP)
            said = on.trainer.order("publish", version=version)
            assert said["served"] == [other.url] and said["seconds"] < deadline
            load.require(version)
            assert on.trainer.order("after_gate", version=version) == {"behind": [victim.url]}
            victim.signal(signal.SIGCONT)
            assert on.trainer.order("wait_until_all_serve", seconds=20) == {"behind": []}
        said = on.trainer.order("publish", version=3)
        assert sorted(said["served"]) == sorted(on.urls)
        load.require(3)
        assert on.trainer.order("after_gate", version=3, last=True) == {"behind": []}
        load.stop()
        load.check()
        assert on.trainer.end() == [0, 0]


@pytest.mark.prove
@pytest.mark.parametrize("mode", MODES)
def test_weights_on_their_way_to_the_next_version_are_given_to_nobody(mode: str, model: Path, tmp_path: Path) -> None:
    """A replica that starts again in the middle of a batch gets its version from disk, where it lies whole, or else
    waits for the next."""
    with stage(tmp_path, model, publish=mode, verify_every=1) as on:
        assert sorted(on.trainer.order("publish", version=1)["served"]) == sorted(on.urls)
        on.trainer.order("after_gate", version=1)
        victim = on.servers[0]
        victim.signal(signal.SIGKILL)
        victim.start(model, 0)
        on.trainer.order("begin_batch", version=20)
        behind = on.trainer.order("wait_until_all_serve", seconds=4)["behind"]
        assert behind == ([] if mode == "disk" else [victim.url])
        assert sorted(on.trainer.order("publish", version=2)["served"]) == sorted(on.urls)
        assert on.trainer.order("after_gate", version=2, last=True) == {"behind": []}  # by checksum
        assert on.trainer.end() == [0, 0]


@pytest.mark.prove
def test_when_nobody_serves_the_trainer_waits_for_one_and_then_says_so(model: Path, tmp_path: Path) -> None:
    with stage(tmp_path, model, publish="shm", weights_deadline=16.0) as on:
        for server in on.servers:
            server.signal(signal.SIGKILL)
        on.trainer.tell("publish", version=1)
        on.servers[0].start(model, 0)
        assert on.trainer.answer()["served"] == [on.urls[0]]
        on.trainer.order("after_gate", version=1)
        on.servers[0].signal(signal.SIGKILL)
        on.trainer.tell("publish", version=2)
        assert all(process.wait(40) != 0 for process in on.trainer.processes)
        assert "no inference replica serves weights v2" in on.trainer.log.read_text()


@pytest.mark.prove
@pytest.mark.parametrize("mode", MODES)
def test_a_replica_that_refuses_is_left_out_and_says_that_its_weights_are_good_for_nothing(
    mode: str, model: Path, tmp_path: Path
) -> None:
    """It was started with a model of another shape."""
    other = build(tmp_path / "other", "qwen3_full_tied")
    with stage(tmp_path, model, models=[model, other], publish=mode, weights_deadline=20.0) as on:
        for version in (1, 2):
            said = on.trainer.order("publish", version=version)
            assert said["mode"] == mode and said["served"] == on.urls[:1] and list(said["behind"]) == on.urls[1:]
            assert on.trainer.order("after_gate", version=version) == {"behind": on.urls[1:]}
        assert call(on.urls[1], "/model_info")[2]["weight_version"] == "-1"
        assert call(on.urls[1], "/health")[0] == 200
        assert on.trainer.order("wait_until_all_serve", seconds=2) == {"behind": on.urls[1:]}
        assert on.trainer.end() == [0, 0]
