"""The inference service as a process of a run, its configuration, and the end of a server whose engine dies."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from pathlib import Path

import pytest

from meshy.inference.config import InferenceConfig
from meshy.inference.embedded.engine import EngineFailure
from meshy.inference.embedded.launch import EmbeddedOptions, EmbeddedServer
from meshy.inference.service import weights_at_start
from meshy.observe.jsonl import read_jsonl
from meshy.observe.runfolder import RunFolder
from meshy.recipe import Recipe
from meshy.settings import load_recipe
from tests.inference.models import CONTEXT, call
from tests.inference.replica import RECIPE, replica_process

HOST = "127.0.0.1"


@pytest.mark.e2e
def test_a_replica_serves_reports_and_ends(tmp_path: Path):
    with replica_process(tmp_path / "run") as replica:
        replica.wait_ready(60)
        sampling = {"max_new_tokens": 40, "ignore_eos": True}
        written = call(replica.url, "/generate", {"input_ids": [5, 6, 7], "sampling_params": sampling})[2]
        assert written["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 40}]
        too_long = {"max_new_tokens": 500}  # the recipe's context length is 128
        assert call(replica.url, "/generate", {"input_ids": [5], "sampling_params": too_long})[0] == 400
        health = replica.health()
        assert health["engine"] == "embedded" and health["engine_reason"] == "auto: there is no GPU"
        assert health["weight_version"] == "0" and health["running"] == 0
        metrics = replica.metrics()
        assert metrics["meshy_generated_tokens"] == 40 and metrics["meshy_tokens_per_busy_second"] > 0
        replica.process.terminate()
        assert replica.process.wait(20) == 143, replica.log
    spans = [row for row in read_jsonl(replica.folder.timeline_of("inference.0")) if row["name"] == "decode"]
    assert spans and all(row["start"] <= row["end"] for row in spans)


@pytest.mark.prove
@pytest.mark.e2e
def test_a_replica_begins_with_the_newest_weights_on_disk(tmp_path: Path):
    folder = RunFolder(tmp_path / "run").make()
    for version in (3, 12):
        shutil.copytree("recipes/demo_model", folder.weights_of(version))
    (folder.weights / ".v13.part").mkdir()
    with replica_process(folder.path) as replica:
        replica.wait_ready(60)
        info = call(replica.url, "/model_info")[2]
        assert info["weight_version"] == "12"
        assert not list(folder.weights.glob(".start-*"))


def test_without_weights_on_disk_the_initial_model_is_version_0(tmp_path: Path):
    folder = RunFolder(tmp_path / "run").make()
    with weights_at_start(folder, Path("model"), "inference.0") as start:
        assert start == (Path("model"), 0)


def test_weights_at_start_outlive_their_version(tmp_path: Path):
    """The trainer deletes old versions while a replica still loads one."""
    folder = RunFolder(tmp_path / "run").make()
    for version in (2, 3):
        shutil.copytree("recipes/demo_model", folder.weights_of(version))
    with weights_at_start(folder, Path("model"), "inference.0") as (path, version):
        assert version == 3
        shutil.rmtree(folder.weights_of(3))
        assert (path / "model.safetensors").read_bytes() == Path("recipes/demo_model/model.safetensors").read_bytes()


def test_a_server_whose_engine_dies_answers_500_and_ends_with_the_cause(folder: Path):
    server = EmbeddedServer(EmbeddedOptions(model_path=folder, context_length=CONTEXT, max_running_requests=4))

    def explode(*_: object) -> None:
        raise MemoryError("no more")

    server.engine.runner.forward = explode  # type: ignore[method-assign, assignment]
    server.start()
    answers: list[tuple] = []
    client = threading.Thread(
        target=lambda: answers.append(call(f"http://{HOST}:{server.port}", "/generate", {"input_ids": [1]}))
    )
    client.start()
    with pytest.raises(EngineFailure) as caught:
        server.wait()
    client.join(30)
    assert isinstance(caught.value.__cause__, MemoryError)
    status, _, body = answers[0]
    assert status == 500 and "no more" in body["error"]["message"]


def test_a_port_that_is_taken_is_an_error(folder: Path):
    options = EmbeddedOptions(model_path=folder, context_length=CONTEXT, max_running_requests=4)
    first = EmbeddedServer(options)
    try:
        with pytest.raises(OSError, match=str(first.port)):
            EmbeddedServer(dataclasses.replace(options, port=first.port))
    finally:
        first.close()


def with_inference(config: InferenceConfig) -> Recipe:
    """The first recipe with that configuration."""
    recipe = load_recipe(RECIPE, {}, 2)
    groups = tuple(
        dataclasses.replace(group, config=config) if group.id == "inference" else group for group in recipe.groups
    )
    return dataclasses.replace(recipe, groups=groups)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (InferenceConfig(tp=2), "tp=2 x dp=1 do not make up gpus_per_replica=1"),
        (InferenceConfig(dp=2), "do not make up gpus_per_replica=1; change one of them (tp is gpus_per_replica / dp"),
        (InferenceConfig(engine="embedded", quantization="fp8"), "quantization: only SGLang knows this"),
        (InferenceConfig(memory_fraction=90.0), "memory_fraction: expected a share in (0, 1), got 90.0"),
        (InferenceConfig(startup_deadline=0.0), "startup_deadline: expected more than 0"),
        (InferenceConfig(max_running_requests=0), "max_running_requests: expected at least 1"),
        (InferenceConfig(threads=0), "threads: expected at least 1"),
        (InferenceConfig(context_length=16), "below the recipe's context_length=128"),
    ],
)
def test_faults_say_what_to_change(config: InferenceConfig, message: str):
    (fault,) = config.faults(with_inference(config))
    assert message in fault


def test_the_default_configuration_has_no_fault():
    assert InferenceConfig().faults(load_recipe(RECIPE, {}, 2)) == []
