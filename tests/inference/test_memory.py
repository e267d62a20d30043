"""A replica of a ring while its GPU is somebody else's: what it holds, what it answers, what it takes up again."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from meshy.inference.config import InferenceConfig
from meshy.inference.embedded.launch import EmbeddedOptions, EmbeddedServer
from meshy.inference.granted import GrantError, Weights, granted, to_load
from meshy.inference.preflight import ring_faults
from meshy.inference.service import InferenceService
from meshy.observe.jsonl import read_jsonl
from meshy.observe.runfolder import RunFolder
from meshy.recipe import FALLBACK, ON_DEMAND, ColocationRing, Recipe
from meshy.service.context import Context
from meshy.settings import load_recipe
from tests.inference.models import CONTEXT, VOCAB, byte_tokenizer, call
from tests.inference.replica import NAME, RECIPE, launch_file
from tests.inference.test_protocol import in_background, until

MB = 1 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """A model of over 200 MB, and the bytes of its weights."""
    folder = tmp_path_factory.mktemp("large")
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    size = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert size >= 200 * MB
    yield folder, size


@pytest.mark.e2e
def test_weights_leave_the_memory_and_come_back(large: tuple[Path, int], tmp_path: Path):
    """PSS of the engine's process: while freed, and after taking up the same weights and newer ones."""
    folder, size = large
    command = [sys.executable, "-m", "tests.inference.freeing", str(tmp_path / "run"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["tokens"][0] == told["tokens"][1] == told["tokens"][2]
    for freed in told["freed"]:
        assert told["full"] - freed >= 0.9 * size
    for back in told["back"]:
        assert abs(told["full"] - back) <= 0.1 * size
    names = {row["name"] for row in read_jsonl(RunFolder(tmp_path / "run").timeline_of("inference.0"))}
    assert {"free", "restore"} <= names


@pytest.fixture
def embedded(folder: Path) -> Iterator[tuple[EmbeddedServer, str]]:
    server = EmbeddedServer(EmbeddedOptions(model_path=folder, context_length=CONTEXT, max_running_requests=4))
    server.start()
    try:
        yield server, f"http://127.0.0.1:{server.port}"
    finally:
        server.close()


def test_while_freed_it_is_there_and_nobody_takes_its_memory(embedded, folder, model_folders):
    server, url = embedded
    server.free()
    assert call(url, "/health")[0] == 200 and call(url, "/model_info")[2]["weight_version"] == "0"
    status, _, answer = call(url, "/resume_memory_occupation", {"tags": ["weights"]})
    assert status == 400 and "another service's until the ring's token is back" in json.dumps(answer)
    status, _, answer = call(url, "/weights_checker", {"action": "checksum"})
    assert status == 400 and "released" in json.dumps(answer)
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    asked = in_background(call, url, "/generate", body)
    until(lambda: call(url, "/v1/loads")[2]["loads"][0]["num_waiting_reqs"] == 1, "the request to wait")
    assert call(url, "/flush_cache", {})[0] == 200
    update = {"model_path": str(model_folders["other"]), "weight_version": "4"}
    late = in_background(call, url, "/update_weights_from_disk", update)
    until(lambda: server.engine._updates, "the update to wait")
    for command in ("/pause_generation", "/continue_generation"):  # of somebody who does not know
        assert call(url, command, {"mode": "retract"})[0] == 200
    assert server.engine.runner.weights.parked and not asked.done() and not late.done()
    server.restore(folder, 3)
    assert call(url, "/model_info")[2]["model_path"] in (str(folder), str(model_folders["other"]))
    assert asked.result(60)[0] == late.result(60)[0] == 200
    assert call(url, "/model_info")[2]["weight_version"] == "4"


HERE = Path(__file__).parent
GONE = Path("/nowhere")


@pytest.mark.parametrize(
    ("grant", "keeps", "wanted"),
    [
        (None, True, None),
        (None, False, Weights(3, HERE)),
        (Weights(2, GONE), True, None),
        (Weights(3, GONE), True, None),
        (Weights(3, HERE.parent), False, Weights(3, HERE.parent)),
        (Weights(4, HERE.parent), True, Weights(4, HERE.parent)),
        (Weights(4, HERE.parent), False, Weights(4, HERE.parent)),
    ],
)
def test_what_is_loaded(grant: Weights | None, keeps: bool, wanted: Weights | None):
    """Where weights v3 of `HERE` are served."""
    assert to_load(grant, 3, Weights(3, HERE), keeps) == wanted


def test_weights_that_nothing_holds_are_an_error():
    """They were broadcast after the last ones that came from a folder."""
    with pytest.raises(GrantError, match=r"no folder holds them.*holds v2\. Set enable_weights_cpu_backup"):
        to_load(None, 3, Weights(2, HERE), keeps=False)
    with pytest.raises(GrantError, match=r"weights v4.*/nowhere, but there is no such folder"):
        to_load(Weights(4, GONE), 3, Weights(3, HERE), keeps=True)


def test_a_payload_without_weights_is_none_and_one_without_sense_an_error():
    assert granted({}) is None and granted({"weights": {"version": 7, "folder": "/x"}}) == Weights(7, Path("/x"))
    with pytest.raises(GrantError, match="by version and folder"):
        granted({"weights": 7})


def test_in_its_first_turn_it_loads_what_the_token_names(tmp_path: Path):
    model = Path("recipes/demo_model")
    with launch_file(tmp_path / "run", model) as (file, _):
        service = InferenceService(Context.load(file, NAME))
        for payload, wanted in [
            ({}, (model.absolute(), 0)),
            ({"weights": {"version": 5, "folder": str(tmp_path)}}, (tmp_path, 5)),
        ]:
            service.ring = SimpleNamespace(payload=payload)  # type: ignore[assignment]
            with service._weights_at_start() as start:
                assert start == wanted
        service.ring = SimpleNamespace(payload={"weights": {"version": 5, "folder": "/nowhere"}})  # type: ignore[assignment]
        with pytest.raises(GrantError, match="no such folder on this host"), service._weights_at_start():
            pass
        service.timeline.close()


def in_ring(config: InferenceConfig, partner: str) -> Recipe:
    """The first recipe with that configuration, in a ring with the group `partner`."""
    recipe = load_recipe(RECIPE, {}, 2)
    groups = tuple(
        dataclasses.replace(group, config=config) if group.id == "inference" else group for group in recipe.groups
    )
    ring = ColocationRing(id="gpus", members=((partner, ON_DEMAND), ("inference", FALLBACK)))
    return dataclasses.replace(recipe, groups=groups, rings=(ring,))


def test_in_a_ring_on_gpus_sglang_saves_memory():
    config = InferenceConfig()
    alone, ring = load_recipe(RECIPE, {}, 2), in_ring(config, "trainer")
    assert config.saves_memory(ring, on_gpu=True) and not config.saves_memory(ring, on_gpu=False)
    assert not config.saves_memory(alone, on_gpu=True)
    assert not config.backs_up_weights(ring, on_gpu=True)  # the trainer leaves them in a folder
    assert config.backs_up_weights(in_ring(config, "rollout"), on_gpu=True)
    off = InferenceConfig(memory_saver=False)
    (fault,) = ring_faults(off, in_ring(off, "trainer"), on_gpu=True)
    assert fault.startswith("memory_saver: in a ring, SGLang must free its GPUs")
    assert ring_faults(off, in_ring(off, "trainer"), on_gpu=False) == []
