"""Weight versions on disk: folders in Hugging Face format that are either whole or not there."""

import json
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from meshy.generation.expected import CHECKSUMS
from meshy.models import read_config
from meshy.observe.runfolder import versions_in
from meshy.training.weights.shards import write_shards

# What transformers and an inference engine need beside the tensors.
COPIED = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip


def write_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], source: Path, dtype: torch.dtype | None = None
) -> None:
    """`stage_weights` and `settle_weights` in one."""
    settle_weights(stage_weights(folder, tensors, source, dtype))


def stage_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], source: Path, dtype: torch.dtype | None = None
) -> Path:
    """Writes a model folder: `tensors` under their Hugging Face names (cast to dtype), the rest copied from `source`.

    It lies under a temporary name, which is returned: whole, and good to load, but not yet safe from a power failure. A
    part left behind by a writer that died is taken away first.
    """
    part = _part_of(folder)
    part.mkdir()
    index: dict[str, str] = {}
    total = 0
    for shard in write_shards(part, tensors, dtype):
        index.update(dict.fromkeys(shard.names, shard.path.name))
        total += shard.size
    if len(set(index.values())) == 1:
        (part / "model-00001.safetensors").rename(part / "model.safetensors")
    else:
        listing = {"metadata": {"total_size": total}, "weight_map": index}
        (part / "model.safetensors.index.json").write_text(json.dumps(listing, indent=1))
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, part / name)
    if dtype is not None:
        _name_dtype(part / "config.json", str(dtype).removeprefix("torch."))
    return part


def _part_of(folder: Path) -> Path:
    """The temporary name, which nothing has."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left_over in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(left_over)
    return folder.parent / f".{folder.name}.part"


def _name_dtype(config_file: Path, dtype: str) -> None:
    """Has config.json say what the tensors are."""
    config = json.loads(config_file.read_text())
    said = "torch_dtype" if "torch_dtype" in config else "dtype"
    if config.get(said) != dtype:
        config_file.write_text(json.dumps({**config, said: dtype}, indent=2))


def settle_weights(part: Path) -> None:
    """`name_weights` once everything in it is on the disk.

    Waiting for the disk takes from milliseconds to a second, depending on what else is written; nobody who loads the
    weights needs to wait for it.
    """
    _to_disk(part)
    _sync(name_weights(part).parent)


def name_weights(part: Path) -> Path:
    """Gives what was staged its name; it replaces a folder of that name."""
    folder = part.parent / part.name.removeprefix(".").removesuffix(".part")
    if folder.exists():
        old = folder.parent / f".{folder.name}.old"
        folder.rename(old)
        part.rename(folder)
        shutil.rmtree(old)
    else:
        part.rename(folder)
    return folder


def stage_copy(folder: Path, source: Path) -> Path:
    """What `stage_weights` does, of weights that lie in another folder, whose files are not copied where both are on
    one file system. Neither's may be written to afterwards."""
    part = _part_of(folder)
    copy = _link if _on_one_system(source, part.parent) else shutil.copyfile
    shutil.copytree(source, part, copy_function=copy, ignore=shutil.ignore_patterns(CHECKSUMS))
    return part


def prune_weights(weights: Path, keep: int) -> None:
    """Deletes all but the `keep` newest versions (folders v<N>)."""
    versions = sorted(versions_in(weights), reverse=True)
    for version in versions[keep:]:
        dying = weights / f".v{version}.old"  # so that no half version is ever seen under its name
        (weights / f"v{version}").rename(dying)
        shutil.rmtree(dying)


def weight_bytes(folder: Path) -> int:
    """Bytes of the files that hold its tensors."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def dtype_of(source: Path, wanted: str) -> torch.dtype:
    """The torch dtype called `wanted`; for "auto" the one that the model's config.json names, or else float32."""
    if wanted == "auto":
        config = read_config(source)
        wanted = config.get("dtype") or config.get("torch_dtype") or "float32"
    return getattr(torch, wanted)


def _on_one_system(a: Path, b: Path) -> bool:
    return a.stat().st_dev == b.stat().st_dev


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # not every file system has links
        shutil.copyfile(source, target)


def _to_disk(folder: Path) -> None:
    """All files at once: a file system commits them together, which takes about as long as one."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(_sync, folder.iterdir()))
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
