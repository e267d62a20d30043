"""What is said beforehand of a model's folder is what TorchTitan would find when it loads it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshy.models import weight_headers
from meshy.titan.model_spec import MODELS, model_spec
from meshy.trainable import KINDS, VALUE, backend_faults, expected_weights, loading_faults
from tests.training.models import make_model

LONGEST = 128


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("qwen3", "qwen3_tied", "qwen2", "qwen2_tied"):
        make_model(name, folder)
    return folder


@pytest.mark.parametrize("value_head", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_tied", "qwen2", "qwen2_tied"])
def test_the_weights_that_are_expected_are_those_that_torchtitan_asks_for(models: Path, name: str, value_head: bool):
    assert set(MODELS) == set(KINDS)
    spec = model_spec(models / name, max_seq_len=64, flex=False, value_head=value_head)
    with torch.device("meta"):
        model = spec.model.build()
    asked = spec.state_dict_adapter(spec.model, str(models / name)).to_hf(model.state_dict())
    config = json.loads((models / name / "config.json").read_text())
    assert expected_weights(config, value_head=value_head) == {key: tuple(value.shape) for key, value in asked.items()}
    assert loading_faults(models / name, LONGEST, value_head=value_head) == []
    if not value_head:
        assert {n: h.shape for n, h in weight_headers(models / name).items()} == expected_weights(config)


def configured(**changes: Any) -> Callable[[Path], None]:
    """None: without that key."""

    def change(folder: Path) -> None:
        config = {**json.loads((folder / "config.json").read_text()), **changes}
        config = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))

    return change


def weighed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return changed


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (configured(model_type="llama"), "model_type 'llama' is not supported here; supported: qwen3, qwen2"),
        (configured(model_type=None), "model_type None is not supported"),
        (configured(use_sliding_window=True), "sliding-window"),
        (configured(attention_bias=True), "attention_bias"),
        (configured(hidden_act="gelu"), "hidden_act 'gelu'"),
        (configured(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "rope type 'yarn'"),
        (configured(rope_scaling={"type": "linear", "factor": 2}, rope_parameters=None), "rope type 'linear'"),
        (configured(rope_parameters=None, rope_theta=None), "no rope_theta"),
        (configured(hidden_size=None), "hidden_size: expected a whole number of at least 1, got None"),
        (configured(num_hidden_layers="two"), "num_hidden_layers: expected a whole number of at least 1, got 'two'"),
        (configured(num_attention_heads=3), "num_attention_heads is no multiple of num_key_value_heads"),
        (configured(num_hidden_layers=3), "lack model.layers.2.self_attn.q_proj.weight"),
        (configured(num_hidden_layers=1), "hold model.layers.1.input_layernorm.weight"),
        (configured(vocab_size=100), "model.embed_tokens.weight [97, 48] (not [100, 48])"),
        (configured(max_position_embeddings=64), "takes rows of 64 tokens, but context_length is 128; lower that"),
        (weighed(lambda w: w.update({"model.norm.weight": torch.ones(48).char()})), "norm.weight (I8); supported: F64"),
        (weighed(lambda w: w.pop("model.norm.weight")), "lack model.norm.weight"),
        (weighed(lambda w: w.update({"model.norm.weight": torch.ones(7)})), "model.norm.weight [7] (not [48])"),
    ],
)
def test_a_folder_that_cannot_be_loaded_is_told(models: Path, tmp_path: Path, damage, told: str):
    folder = Path(shutil.copytree(models / "qwen3_tied", tmp_path / "model"))
    assert loading_faults(folder, LONGEST) == []
    damage(folder)
    faults = loading_faults(folder, LONGEST)
    assert any(told in fault for fault in faults), faults
    assert all(str(folder) in fault for fault in faults)


def test_a_head_of_several_numbers_is_none_of_values(models: Path, tmp_path: Path):
    folder = Path(shutil.copytree(models / "qwen3_tied", tmp_path / "model"))
    weighed(lambda w: w.update({VALUE: torch.zeros(3, 48)}))(folder)
    (fault,) = loading_faults(folder, LONGEST, value_head=True)
    assert "gives 3 numbers; take a model that gives one (num_labels=1)" in fault


def test_a_backend_that_this_torch_does_not_have():
    assert backend_faults("partial_dtensor") == []
    assert "spmd_backend: expected 'partial_dtensor'" in backend_faults("spmd_types")[0]
