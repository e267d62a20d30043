"""The model's tensors: new values from a folder or from other tensors, checked first; giving their memory back."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


class WeightError(ValueError):
    """Weights that cannot be loaded; the live ones are untouched. The message says what is wrong with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Weights to be loaded from a folder, and what goes with it."""

    folder: Path
    version: str | None = None
    flush_cache: bool = True
    abort_all: bool = False


def live_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every weight once, by its Hugging Face name: parameters (tied ones by their first name) and saved buffers."""
    saved = model.state_dict(keep_vars=True).keys()
    named: dict[str, Tensor] = dict(model.named_parameters())
    named.update((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    return named


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder in Hugging Face format. Raises WeightError if there are none."""
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            names = set(json.loads(index.read_text())["weight_map"].values())
            files = [folder / name for name in sorted(names)]
        else:
            files = sorted(folder.glob("*.safetensors"))
    except (OSError, ValueError, KeyError) as error:
        raise WeightError(f"Cannot read {index}: {error}") from error
    if not files:
        what = "holds no *.safetensors file" if folder.is_dir() else "is not a folder"
        raise WeightError(f"Cannot load weights: {folder} {what}.")
    return files


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path) -> None:
    """Copy the weights of a folder into the live tensors, one by one, converting to their dtype.

    Everything is checked before the first tensor changes. Raises WeightError.
    """
    live = live_tensors(model)
    aliases = model.state_dict(keep_vars=True).keys()
    with ExitStack() as stack:
        source: dict[str, Any] = {}
        try:
            for path in checkpoint_files(folder):
                file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
                source.update((name, file) for name in file.keys())  # noqa: SIM118
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in source.items()}
        except (OSError, SafetensorError) as error:
            raise WeightError(f"Cannot load weights from {folder}: {error}") from error
        _check_names(folder, live, shapes, set(aliases))
        for name, tensor in live.items():
            tensor.copy_(source[name].get_tensor(name))


def _check_names(folder: Path, live: dict[str, Tensor], shapes: dict[str, tuple[int, ...]], aliases: set[str]) -> None:
    missing = sorted(live.keys() - shapes.keys())
    unknown = sorted(shapes.keys() - aliases)
    wrong = [name for name in live if name in shapes and shapes[name] != tuple(live[name].shape)]
    if missing or unknown:
        raise WeightError(
            f"Cannot load weights: {folder} is of another model ({len(missing)} tensors missing, e.g. {missing[:2]}; "
            f"{len(unknown)} unknown, e.g. {unknown[:2]})."
        )
    if wrong:
        name = wrong[0]
        raise WeightError(
            f"Cannot load weights: {name} in {folder} has shape {shapes[name]}, the model {tuple(live[name].shape)}."
        )


@torch.no_grad()
def load_tensors(model: nn.Module, named: Sequence[tuple[str, Tensor]]) -> None:
    """Copy some tensors into the live ones of their names, converting to their dtype. The second name of a tied weight
    is known, and its tensor passed over. Everything is checked before the first one changes. Raises WeightError.
    """
    live = live_tensors(model)
    second = model.state_dict(keep_vars=True).keys() - live.keys()
    unknown = sorted({name for name, _ in named} - live.keys() - second)
    if unknown:
        raise WeightError(f"Cannot load weights: the model has no tensor {unknown[0]!r} ({len(unknown)} are unknown).")
    pairs = [(name, live[name], tensor) for name, tensor in named if name in live]
    for name, old, new in pairs:
        if new.shape != old.shape:
            raise WeightError(
                f"Cannot load weights: {name} has shape {tuple(new.shape)}, the model {tuple(old.shape)}."
            )
        if new.is_floating_point() != old.is_floating_point():
            raise WeightError(f"Cannot load weights: {name} is of {new.dtype}, in the model of {old.dtype}.")
    for _, old, new in pairs:
        old.copy_(new)


class Parked:
    """The tensors of a model while their memory is given back: on the host for a GPU model, in a file for a CPU one."""

    def __init__(self, model: nn.Module) -> None:
        self._live = live_tensors(model)
        self._device = next(iter(self._live.values())).device
        self._host: dict[str, Tensor] = {}
        self._file: Any = None
        if self._device.type == "cpu":
            self._file = tempfile.NamedTemporaryFile(prefix="meshy-weights-", suffix=".safetensors")  # noqa: SIM115
            save_file({name: tensor.detach().contiguous() for name, tensor in self._live.items()}, self._file.name)
        else:
            self._host = {name: tensor.detach().to("cpu") for name, tensor in self._live.items()}
        for tensor in self._live.values():
            tensor.data = tensor.data.new_empty(0)

    def restore(self) -> None:
        """Bring every tensor back, bit for bit."""
        host = self._host if self._file is None else load_file(self._file.name)
        for name, tensor in self._live.items():
            # A copy of its own: tensors loaded from a file would stay bound to the file's memory map.
            tensor.data = host[name].to(self._device, copy=True)
        if self._file is not None:
            self._file.close()
