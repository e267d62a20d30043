"""A trainer in a ring: real ranks that leave their device before replicas, real servers, load what they have made."""

from __future__ import annotations

import os
import queue
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshy.generation.expected import CHECKSUMS, compare, read_expected
from meshy.observe.runfolder import versions_in
from meshy.training.weights.shelf import MEMORY
from tests.inference.models import build, call
from tests.training.stage import Stage, stage

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("ring_publishing") / "model", "qwen3_grouped_untied")


def load(url: str, folder: str, version: int) -> None:
    """What a replica does that is granted the token."""
    told = {"model_path": folder, "weight_version": str(version)}
    assert call(url, "/update_weights_from_disk", told)[0] == 200


def begin(on: Stage, version: int, last: bool = False) -> dict[str, Any]:
    """The trainer has made a version, left its device and waits; what travels with the token."""
    on.trainer.tell("publish", version=version, last=last)
    weights = on.trainer.answer()["weights"]
    assert weights["version"] == version
    return weights


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_versions_go_by_a_folder_that_the_token_names(model: Path, tmp_path: Path) -> None:
    weights = tmp_path / "run" / "weights"
    with stage(tmp_path, model, ring=2, verify_every=1, write_every=2, keep_weights=9) as on:
        for publish, stored in (("auto", "float32"), ("auto", "bfloat16"), ("disk", "float32")):
            for url in on.urls:
                assert call(url, "/update_weight_version", {"new_version": "0"})[0] == 200
            assert on.trainer.order("use", publish=publish, stored=stored) == {"behind": []}
            shutil.rmtree(weights, ignore_errors=publish != "disk")
            shelf = make_three(on, publish, stored)
            assert versions_in(weights) == ([1, 2, 3] if publish == "disk" else [2, 3])
        made_of_others = begin(on, 4)["folder"]
        load(on.urls[0], made_of_others, 4)
        load(on.urls[1], str(shelf / "v3"), 4)
        on.trainer.answer()
        on.trainer.tell("after_gate", version=4)
        assert all(process.wait(40) != 0 for process in on.trainer.processes)
        told = on.trainer.log.read_text()
        assert not shelf.exists()
    assert f"other weights than the trainer:\n  {on.urls[1]}: 25 tensors" in told and f"  {on.urls[0]}:" not in told


def make_three(on: Stage, publish: str, stored: str) -> Path:
    """Three versions, each compared with sums that were made while the trainer had its device; their shelf."""
    weights = on.folder / "run" / "weights"
    for version in (1, 2, 3):
        given = begin(on, version, last=version == 3)
        shelf = Path(given["folder"]).parent
        assert shelf.parent == (weights if publish == "disk" else MEMORY)
        assert versions_in(shelf) == [v for v in (version - 1, version) if v]
        for url in on.urls:
            load(url, given["folder"], version)
        said = on.trainer.answer()
        assert sorted(said["served"]) == sorted(on.urls) and not said["behind"], said
        assert said["mode"] == ("disk" if publish == "disk" else "shm") and said["bytes"] > 0
        assert on.trainer.order("after_gate", version=version, last=version == 3) == {"behind": []}
        if version in versions_in(weights):
            kept = tensors(weights / f"v{version}")
            for name, tensor in tensors(Path(given["folder"])).items():
                assert torch.equal(kept[name], tensor.to(getattr(torch, stored))), name
    return shelf


@pytest.mark.prove
def test_in_a_larger_ring_replicas_compare_and_nobody_asks_them(model: Path, tmp_path: Path) -> None:
    """And no deadline is shorter than another member's work."""
    with stage(tmp_path, model, ring=3, publish="disk", verify_every=2, weights_deadline=0.2) as on:
        one, other = on.urls
        on.servers[0].end()
        on.trainer.tell("use")
        with pytest.raises(queue.Empty):
            on.trainer.answer(1.5)
        on.servers[0].start(model, 0)
        assert on.trainer.answer() == {"behind": []}
        assert CHECKSUMS not in os.listdir(begin(on, 1)["folder"])
        with pytest.raises(queue.Empty):
            on.trainer.answer(1.5)
        for url in on.urls:
            load(url, str(tmp_path / "run" / "weights" / "meshy-weights-shelf" / "v1"), 1)
        assert sorted(on.trainer.answer()["served"]) == sorted(on.urls)
        assert on.trainer.order("after_gate", version=1) == {"behind": []}
        folder = begin(on, 2)["folder"]
        load(one, folder, 2)
        load(other, str(Path(folder).parent / "v1"), 2)
        assert sorted(on.trainer.answer()["served"]) == sorted(on.urls)
        for url, wrong in ((one, False), (other, True)):
            reported = call(url, "/weights_checker", {"action": "checksum"})[2]["ranks"]
            assert bool(compare(read_expected(Path(folder), url) or [], reported)) is wrong
        assert on.trainer.order("after_gate", version=2) == {"behind": []}
        assert CHECKSUMS not in os.listdir(tmp_path / "run" / "weights" / "v2")
