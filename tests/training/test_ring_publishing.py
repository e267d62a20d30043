"""A trainer in a ring: real ranks that leave their device before replicas, real servers, load what they have made."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

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
    with stage(tmp_path, model, ring=True, verify_every=1, write_every=2, keep_weights=9) as on:
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
def test_whoever_does_not_come_to_serve_a_version_is_named(model: Path, tmp_path: Path) -> None:
    with stage(tmp_path, model, ring=True, verify_every=0, weights_deadline=8.0) as on:
        one, other = on.urls
        load(one, begin(on, 1)["folder"], 1)
        said = on.trainer.answer()
        assert said["served"] == [one] and said["behind"] == {other: f"{other} serves v0"}
        assert on.trainer.order("after_gate", version=1) == {"behind": [other]}
        begin(on, 2)
        assert all(process.wait(40) != 0 for process in on.trainer.processes)
        told = on.trainer.log.read_text()
    assert "no inference replica serves weights v2" in told
    assert f"  {one} serves v1\n  {other} serves v0" in told
