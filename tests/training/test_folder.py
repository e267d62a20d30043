import os
import weakref

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from meshy.observe.runfolder import versions_in
from meshy.training.weights import shards
from meshy.training.weights.folder import dtype_of, prune_weights, write_weights


@pytest.fixture
def source(models):
    return models / "qwen3_tied"


@pytest.fixture
def tensors(source):
    return dict(load_file(source / "model.safetensors"))


@pytest.mark.parametrize(("shard_bytes", "header_bytes"), [(1 << 30, 1 << 17), (20_000, 1 << 17), (1 << 30, 512)])
def test_transformers_loads_what_is_written(source, tensors, tmp_path, monkeypatch, shard_bytes, header_bytes):
    monkeypatch.setattr(shards, "SHARD_BYTES", shard_bytes)
    monkeypatch.setattr(shards, "HEADER_BYTES", header_bytes)
    write_weights(tmp_path / "v1", tensors.items(), source)
    files = sorted(path.name for path in (tmp_path / "v1").glob("model*"))
    assert (files == ["model.safetensors"]) == (shard_bytes == 1 << 30 and header_bytes > 512)
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "v1", output_loading_info=True)
    assert not told["missing_keys"]
    for name, tensor in tensors.items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_a_writer_that_dies_leaves_no_version_and_the_next_one_cleans_up(source, tensors, tmp_path):
    def dying():
        yield from list(tensors.items())[:2]
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        write_weights(tmp_path / "v1", dying(), source)
    (tmp_path / ".v1.part" / "model-00001.safetensors").write_bytes(b"half a file")
    assert versions_in(tmp_path) == []
    write_weights(tmp_path / "v1", tensors.items(), source)
    assert sorted(os.listdir(tmp_path)) == ["v1"]
    write_weights(tmp_path / "v1", [(name, tensor + 1) for name, tensor in tensors.items()], source)
    name = next(iter(tensors))
    assert torch.equal(load_file(tmp_path / "v1" / "model.safetensors")[name], tensors[name] + 1)
    assert sorted(os.listdir(tmp_path)) == ["v1"]


def test_the_newest_versions_are_kept_by_number(tmp_path):
    for version in (1, 2, 9, 10, 11):
        (tmp_path / f"v{version}").mkdir()
    (tmp_path / "vnext").mkdir()
    prune_weights(tmp_path, keep=2)
    assert versions_in(tmp_path) == [10, 11] and (tmp_path / "vnext").is_dir()


def test_dtype(source):
    assert dtype_of(source, "auto") == torch.float32
    assert dtype_of(source, "bfloat16") == torch.bfloat16


def test_weights_are_cast(source, tensors, tmp_path):
    write_weights(tmp_path / "v1", tensors.items(), source, torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "v1" / "model.safetensors").values()} == {torch.bfloat16}


def test_tensors_of_any_type_and_shape_come_back(source, tmp_path):
    tensors = {
        "bytes": torch.arange(3, dtype=torch.uint8),
        "float": torch.randn(2, 3),
        "transposed": torch.randn(4, 5).T,
        "scalar": torch.tensor(7),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3).bfloat16(),
        "none": torch.empty(0, 4),
    }
    write_weights(tmp_path / "v1", tensors.items(), source)
    back = {k: v for file in (tmp_path / "v1").glob("*.safetensors") for k, v in load_file(file).items()}
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in tensors.items())


def test_no_more_than_one_tensor_is_held(source, tmp_path):
    alive = []

    def stream():
        for number in range(4):
            tensor = torch.full((8,), float(number))
            assert all(weak() is None for weak in alive[:-1])
            alive.append(weakref.ref(tensor))
            yield f"t{number}", tensor
            del tensor

    write_weights(tmp_path / "v1", stream(), source)
    assert len(load_file(tmp_path / "v1" / "model.safetensors")) == 4
