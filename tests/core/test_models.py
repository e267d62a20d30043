"""A model folder that is not whole is told before anything is spawned."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from meshy.models import folder_faults

DEMO = Path(__file__).parents[2] / "recipes" / "demo_model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def _without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _bad_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _missing_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_whole_folder_has_no_fault() -> None:
    assert folder_faults(DEMO) == []


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_cut, "model.safetensors cannot be read"),
        (_without_weights, "holds no *.safetensors file"),
        (_without_tokenizer, "holds no tokenizer"),
        (_without_config, "holds no config.json"),
        (_bad_config, "config.json is not JSON"),
        (_missing_shard, "model-2.safetensors cannot be read"),
    ],
)
def test_what_is_missing_or_broken_is_named(folder: Path, damage: Callable[[Path], None], said: str) -> None:
    damage(folder)
    faults = folder_faults(folder)
    assert len(faults) == 1
    assert said in faults[0]
