"""A replica in a ring gives its memory up and takes it again, whichever engine it runs."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshy.generation import commands
from meshy.generation.client import GenerationClient
from meshy.generation.expected import CHECKSUMS
from meshy.inference.embedded.weights import WeightError
from meshy.inference.granted import GrantError
from meshy.inference.parts import Parts
from meshy.inference.service import InferenceService
from meshy.inference.sglang.server import SglangFailure
from meshy.recipe import Sampling
from tests.inference.contract.conftest import SGLANG
from tests.inference.contract.served import CONTEXT, IDS, Served, Stream, spans
from tests.inference.contract.test_weights import check_serves
from tests.inference.models import build
from tests.inference.replica import service_here

GREEDY = {"max_new_tokens": 600, "ignore_eos": True, "temperature": 0}


class Turns(Served):
    """A replica's service, and its engine behind a URL."""

    service: InferenceService

    def free(self) -> None:
        self.service.free_gpu()

    def grant(self, version: int, folder: Path) -> None:
        self.service.restore_gpu({"weights": {"version": version, "folder": str(folder)}})


def _made(name: str, folders: tuple[Path, Path], run: Path) -> Iterator[Turns]:
    settings = {"inference__engine": name, "inference__context_length": str(CONTEXT), "inference__threads": "1"}
    with service_here(run, folders[0], **settings) as service:
        turns = Turns(name, service.context.replica.url, *folders, limit=CONTEXT)
        turns.service = service
        yield turns


@pytest.fixture(scope="module")
def embedded_turns(folders, tmp_path_factory) -> Iterator[Turns]:
    yield from _made("embedded", folders, tmp_path_factory.mktemp("embedded") / "run")


@pytest.fixture(scope="module")
def sglang_turns(folders, tmp_path_factory) -> Iterator[Turns]:
    yield from _made("sglang", folders, tmp_path_factory.mktemp("sglang") / "run")


@pytest.fixture(params=["embedded", SGLANG])
def turns(request: pytest.FixtureRequest) -> Iterator[Turns]:
    """Each engine in turn. Weights only get newer; a test leaves it neither freed nor busy."""
    yield request.getfixturevalue(f"{request.param}_turns")


def served(turns: Turns) -> int:
    return int(turns.version)


def test_a_request_goes_on_with_the_weights_that_were_granted(turns: Turns):
    turns.free()
    turns.grant(served(turns) + 1, turns.folder)
    whole = turns.greedy(GREEDY["max_new_tokens"])["output_ids"]
    before = turns.version
    stream = Stream(turns, sampling_params=GREEDY)
    stream.until(3)
    turns.free()
    late = turns.in_background(sampling_params={"max_new_tokens": 2, "ignore_eos": True})
    turns.grant(int(before) + 1, turns.other)
    assert spans(late.result(60)[2]) == [(turns.version, 0, 2)]
    last = stream.last()
    (first, _, cut), (second, _, end) = spans(last)
    assert (first, second, end) == (before, str(int(before) + 1), len(whole)) and cut >= 3
    assert last["output_ids"][:cut] == whole[:cut] and last["output_ids"] != whole
    assert last["meta_info"]["num_retractions"] == 1
    check_serves(turns, turns.other)


def test_without_newer_weights_a_request_goes_on_as_if_nothing_had_been(turns: Turns):
    """Greedy tokens and their version are those of a request that was not interrupted."""
    whole = turns.greedy(GREEDY["max_new_tokens"])["output_ids"]
    sums, version = turns.checksums(), turns.version
    for payload in ({}, {"weights": {"version": int(version), "folder": "/nowhere"}}):
        stream = Stream(turns, sampling_params=GREEDY)
        stream.until(3)
        turns.free()
        turns.service.restore_gpu(payload)
        last = stream.last()
        assert last["output_ids"] == whole and [span[0] for span in spans(last)] == [version]
        assert turns.checksums() == sums


def test_older_weights_than_those_served_are_not_taken(turns: Turns, caplog: pytest.LogCaptureFixture):
    turns.free()
    version = served(turns)
    turns.grant(version + 3, turns.other)
    turns.free()
    with caplog.at_level("INFO"):
        turns.grant(version + 1, turns.folder)
    assert served(turns) == version + 3
    assert f"weights v{version + 3} are kept; the token grants v{version + 1}, which are older" in caplog.text
    check_serves(turns, turns.other)


def test_what_was_loaded_is_compared_with_what_the_trainer_has_left(
    turns: Turns, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    engine, folder = turns.service.engine, tmp_path / "left"
    assert engine is not None
    shutil.copytree(turns.other, folder)
    turns.free()
    turns.grant(served(turns) + 1, folder)
    assert "by checksum" not in caplog.text
    sums = [rank["checksums"] for rank in engine.checksums()]
    name = next(iter(sums[0]))
    turns.free()
    newer = served(turns) + 1
    (folder / CHECKSUMS).write_text(json.dumps({turns.url: sums, "http://another:1": []}))
    with caplog.at_level("INFO"):
        turns.grant(newer, folder)
    assert f"weights v{newer} are the trainer's, by checksum" in caplog.text
    turns.free()
    (folder / CHECKSUMS).write_text(json.dumps({turns.url: [{**sums[0], name: "another"}, *sums[1:]]}))
    with pytest.raises(GrantError, match=rf"others than the trainer's, by checksum: 1 tensors, {re.escape(name)}"):
        turns.grant(newer + 1, folder)


def test_what_cannot_be_loaded_is_refused_by_name(turns: Turns, tmp_path: Path):
    turns.free()
    newer = served(turns) + 1
    with pytest.raises(GrantError, match=f"weights v{newer}.*/nowhere, but there is no such folder"):
        turns.grant(newer, Path("/nowhere"))
    with pytest.raises(GrantError, match="should name weights by version and folder"):
        turns.service.restore_gpu({"weights": {"version": 3}})
    turns.grant(newer, turns.folder)
    check_serves(turns, turns.folder)


def test_the_engine_has_the_last_word_on_what_it_serves(turns: Turns, monkeypatch: pytest.MonkeyPatch):
    """Were it to go on with older weights than were granted, the service says so."""
    turns.free()
    version = served(turns)
    engine = turns.service.engine
    assert engine is not None
    with monkeypatch.context() as patch:
        patch.setattr(engine, "restore", lambda folder, version: Parts())
        with pytest.raises(GrantError, match=f"grants weights v{version + 1} .* but the engine serves v{version};"):
            turns.grant(version + 1, turns.other)
    turns.grant(version + 1, turns.folder)


def test_a_freed_replica_is_there_and_what_it_is_asked_waits(turns: Turns):
    """The client neither takes it out of rotation nor sends its requests again."""
    asyncio.run(_ask_while_freed(turns))


async def _ask_while_freed(turns: Turns) -> None:
    async with GenerationClient([turns.url], silence=0.4, deadline=60) as client:
        turns.free()
        asked = asyncio.ensure_future(client.generate(IDS, Sampling(max_new_tokens=5), seed=1))
        for _ in range(4):
            await asyncio.sleep(0.4)  # the time after which the client asks whether it is there
            info = await client.everywhere(commands.MODEL_INFO)
            assert info[turns.url]["weight_version"] == turns.version
        assert not asked.done() and client.rotation.fit == (turns.url,)
        assert (await asyncio.to_thread(turns.service.health))["freed"] is True
        turns.grant(served(turns) + 1, turns.folder)
        completion = await asked
        assert set(completion.versions) == {served(turns)}
        assert client.numbers[turns.url].retries == client.numbers[turns.url].failures == 0
        assert (await asyncio.to_thread(turns.service.health))["freed"] is False


def test_weights_of_another_model_are_refused(turns: Turns, tmp_path: Path):
    """Before anything is changed."""
    other = build(tmp_path / "other", "qwen3_full_tied", 0, 2 * CONTEXT)
    turns.free()
    newer = served(turns) + 1
    with pytest.raises((WeightError, SglangFailure), match="of another model"):
        turns.grant(newer, other)
    assert served(turns) == newer - 1 and turns.service.health()["freed"] is True
    turns.grant(newer, turns.folder)
    check_serves(turns, turns.folder)


def test_weights_that_cannot_be_read_are_refused_in_the_engines_words(turns: Turns, tmp_path: Path):
    """The last test: after this a service ends."""
    (tmp_path / "config.json").write_bytes((turns.folder / "config.json").read_bytes())
    turns.free()
    words = {"embedded": "holds no *.safetensors file", "sglang": "SGLang refused /update_weights_from_disk (400): "}
    with pytest.raises((WeightError, SglangFailure), match=re.escape(words[turns.name])):
        turns.grant(served(turns) + 1, tmp_path)
