"""The same ways to real SGLang: one server, each way, requests in flight, every checksum compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshy.training.weights.choice import InFlight
from meshy.training.weights.collective import Collective
from meshy.training.weights.folder import dtype_of, write_weights
from meshy.training.weights.publisher import Published, Publisher
from meshy.training.weights.shm import Shm
from meshy.training.weights.verify import Verifier, differences
from tests.inference.models import build, call
from tests.inference.real_sglang import sglang
from tests.training.stage import Load

pytestmark = [pytest.mark.sglang, pytest.mark.e2e, pytest.mark.timeout(300)]

CONTEXT = 256
BUCKET = 1 << 18  # several buckets, and the embedding is larger than half of one
HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("publishing") / "model", "qwen3_grouped_untied", positions=2 * CONTEXT)


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with sglang(model, context_length=CONTEXT) as server:
        yield f"http://{HOST}:{server.plan.port}"


@pytest.mark.parametrize("in_flight", ["retract", "keep", "drain"])
@pytest.mark.parametrize("mode", ["disk", "shm", "collective"])
def test_versions_travel_under_load(mode: str, in_flight: InFlight, model: Path, url: str, tmp_path: Path) -> None:
    drain = in_flight == "drain"
    assert call(url, "/update_weight_version", {"new_version": "0"})[0] == 200
    weights = load_file(model / "model.safetensors")
    publisher = Publisher([url], in_flight=in_flight, deadline=60)
    load: Load | None = None
    try:
        told = publisher.start(60)
        assert told[url]["tp_size"] == told[url]["dp_size"] == 1
        verifier = Verifier(json.loads((model / "config.json").read_text()), dtype_of(model, "auto"), told)
        if mode == "shm":
            publisher.carrier = Shm({url: 1}, BUCKET)
        elif mode == "collective":
            publisher.carrier = Collective(HOST, 0, {url: 1}, BUCKET, torch.device("cpu"))
        load = Load([url], in_flight=4)
        for version in range(1, 4):
            weights = {name: tensor + 0.001 * torch.randn_like(tensor) for name, tensor in weights.items()}
            published = publish(publisher, url, version, weights, model, tmp_path)
            assert published.served == [url] and published.mode == mode, published
            load.require(version)
            assert not differences(verifier.expect([url], weights.items()), publisher.checksums([url]))
            load.wait_for_answers(2)
    finally:
        if load is not None:
            load.stop()
        publisher.close()
    load.check()
    spans = {len(set(asked.completion.versions)) for asked in load.asked}
    assert spans == {1} if drain and mode == "disk" else max(spans) > 1 or drain


def publish(
    publisher: Publisher, url: str, version: int, weights: dict[str, torch.Tensor], model: Path, folder: Path
) -> Published:
    if publisher.carrier is not None:
        return publisher.stream(version, [url], weights.items(), torch.float32)
    write_weights(folder / f"v{version}", weights.items(), model)
    return publisher.from_folder(version, [url], folder / f"v{version}")
