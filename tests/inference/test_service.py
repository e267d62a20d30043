"""The inference service as a process of a run, its configuration, and the end of a server whose engine dies."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshy.ignitor.ports import PortBlock
from meshy.inference.config import InferenceConfig
from meshy.inference.embedded.engine import EngineFailure
from meshy.inference.embedded.launch import EmbeddedOptions, EmbeddedServer
from meshy.observe.jsonl import read_jsonl
from meshy.observe.runfolder import RunFolder
from meshy.recipe import Recipe
from meshy.service.context import Launch, run_digest
from meshy.service.readiness import is_ready
from meshy.settings import load_recipe, resolve
from meshy.topology import FIRST_BASE_PORT, LAST_BASE_PORT, Gpu, Topology, derive_topology
from tests.inference.models import CONTEXT, call

RECIPE = "recipes/grpo_sync.py"
HOST = "127.0.0.1"
GPUS = tuple(Gpu(rank, HOST, rank, "cpu") for rank in range(2))


@pytest.fixture
def topology() -> Iterator[Topology]:
    """The first recipe's, on free ports."""
    block, recipe = PortBlock(HOST), load_recipe(RECIPE, {}, len(GPUS))
    for _ in range(50):
        topology = derive_topology(recipe, GPUS, random.randrange(FIRST_BASE_PORT, LAST_BASE_PORT, 2048))
        if not block.claim(topology.ports_on(HOST)):
            yield topology
            block.release()
            return
    raise RuntimeError("no free block of ports")


@pytest.mark.e2e
def test_a_replica_serves_reports_and_ends(topology: Topology, tmp_path: Path):
    folder, replica = RunFolder(tmp_path / "run"), topology.replica("inference.0")
    folder.make()
    launch = Launch(
        run_id="inference-test",
        run_dir=str(folder.path),
        recipe_file=RECIPE,
        settings={},
        gpus=topology.gpus,
        base_port=topology.base_port,
        digest=run_digest(*resolve(RECIPE, {}, topology.gpus, topology.base_port)),
        model_folder="recipes/demo_model",
    )
    launch.write(folder.path / "launch.json")
    log = folder.log("inference.0")
    with log.open("wb") as output:
        command = [sys.executable, "-m", "meshy.service", str(folder.path / "launch.json"), "inference.0"]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 60
        while not is_ready(replica.leader, "inference-test"):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        sampling = {"max_new_tokens": 40, "ignore_eos": True}
        written = call(replica.url, "/generate", {"input_ids": [5, 6, 7], "sampling_params": sampling})[2]
        assert written["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 40}]
        too_long = {"max_new_tokens": 500}  # the recipe's context length is 128
        assert call(replica.url, "/generate", {"input_ids": [5], "sampling_params": too_long})[0] == 400

        admin = f"http://{replica.host}:{replica.leader.admin_port}"
        with urllib.request.urlopen(admin + "/health", timeout=10) as answer:
            health = json.load(answer)
        assert health["engine"] == "embedded" and health["weight_version"] == "0" and health["running"] == 0
        with urllib.request.urlopen(admin + "/metrics", timeout=10) as answer:
            metrics = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines())
        label = '{service="inference.0"}'
        assert float(metrics["meshy_generated_tokens" + label]) == 40
        assert float(metrics["meshy_tokens_per_busy_second" + label]) > 0
        process.terminate()
        assert process.wait(20) == 143, log.read_text()
    finally:
        process.kill()
        process.wait()
    spans = [row for row in read_jsonl(folder.timeline_of("inference.0")) if row["name"] == "decode"]
    assert spans and all(row["start"] <= row["end"] for row in spans)


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
