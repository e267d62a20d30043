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


class LiveWeights:
    """The tensors that a model computes with. tensors: each once, by its Hugging Face name: parameters (tied ones by
    their first name) and saved buffers."""

    def __init__(self, model: nn.Module) -> None:
        saved = model.state_dict(keep_vars=True).keys()
        self.tensors: dict[str, Tensor] = dict(model.named_parameters())
        self.tensors.update((name, buffer) for name, buffer in model.named_buffers() if name in saved)
        self._second = saved - self.tensors.keys()  # of tied ones
        self._parked: _Parked | None = None

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def parked(self) -> bool:
        """Whether their memory is given back."""
        return self._parked is not None

    def park(self) -> None:
        """Give their memory back, if it is not."""
        if self._parked is None:
            self._parked = _Parked(self.tensors)

    def restore(self) -> None:
        """Take it again, if need be; they are as they were."""
        if self._parked is not None:
            self._parked.restore()
            self._parked = None

    @torch.no_grad()
    def load_folder(self, folder: Path) -> None:
        """Copy the weights of a folder into the live tensors, one by one, converting to their dtype.

        Everything is checked before the first tensor changes. Raises WeightError. Where their memory is given back, it
        is taken tensor by tensor, and what they were is not read again.
        """
        with ExitStack() as stack:
            source: dict[str, Any] = {}
            try:
                for path in checkpoint_files(folder):
                    file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
                    source.update((name, file) for name in file.keys())  # noqa: SIM118
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in source.items()}
            except (OSError, SafetensorError) as error:
                raise WeightError(f"Cannot load weights from {folder}: {error}") from error
            self._check_folder(folder, shapes)
            parked, self._parked = self._parked, None
            for name, tensor in self.tensors.items():
                if parked is not None:
                    parked.make(name)
                tensor.copy_(source[name].get_tensor(name))
            if parked is not None:
                parked.forget()

    def _check_folder(self, folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        live = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        if self._parked is not None:
            live = self._parked.shapes
        missing = sorted(live.keys() - shapes.keys())
        unknown = sorted(shapes.keys() - live.keys() - self._second)
        wrong = [name for name in live if name in shapes and shapes[name] != live[name]]
        if missing or unknown:
            raise WeightError(
                f"Cannot load weights: {folder} is of another model ({len(missing)} tensors missing, e.g. "
                f"{missing[:2]}; {len(unknown)} unknown, e.g. {unknown[:2]})."
            )
        if wrong:
            name = wrong[0]
            raise WeightError(
                f"Cannot load weights: {name} in {folder} has shape {shapes[name]}, the model {live[name]}."
            )

    @torch.no_grad()
    def load(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Copy some tensors into the live ones of their names, converting to their dtype. The second name of a tied
        weight is known, and its tensor passed over. Everything is checked before the first one changes. Raises
        WeightError.
        """
        for _, old, new in self._pairs(named):
            if old.data_ptr() != new.data_ptr():  # else it was written there in the first place
                old.copy_(new)

    def places_for(self, named: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """The live tensors that some of these (which may be on the meta device) can be written to byte by byte, by
        name. Raises WeightError where `load` would."""
        return {
            name: old.detach()
            for name, old, new in self._pairs(named)
            if old.dtype == new.dtype and old.is_contiguous()
        }

    def _pairs(self, named: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor, Tensor]]:
        """Name, live tensor, new one. Raises WeightError."""
        self.restore()
        live = self.tensors
        unknown = sorted({name for name, _ in named} - live.keys() - self._second)
        if unknown:
            raise WeightError(
                f"Cannot load weights: the model has no tensor {unknown[0]!r} ({len(unknown)} are unknown)."
            )
        pairs = [(name, live[name], tensor) for name, tensor in named if name in live]
        for name, old, new in pairs:
            if new.shape != old.shape:
                raise WeightError(
                    f"Cannot load weights: {name} has shape {tuple(new.shape)}, the model {tuple(old.shape)}."
                )
            if new.is_floating_point() != old.is_floating_point():
                raise WeightError(f"Cannot load weights: {name} is of {new.dtype}, in the model of {old.dtype}.")
        return pairs


class _Parked:
    """The tensors of a model while their memory is given back: on the host for a GPU model, in a file for a CPU one."""

    def __init__(self, live: dict[str, Tensor]) -> None:
        self._live = live
        self._device = next(iter(self._live.values())).device
        self.shapes = {name: tuple(tensor.shape) for name, tensor in live.items()}
        self._host: dict[str, Tensor] = {}
        self._file = tempfile.TemporaryFile() if self._device.type == "cpu" else None  # noqa: SIM115
        for name, tensor in self._live.items():
            if self._file is None:
                self._host[name] = tensor.detach().to("cpu")
            else:
                self._file.write(raw(tensor.detach().contiguous()))
            tensor.data = tensor.data.new_empty(0)

    def make(self, name: str) -> None:
        """Give one tensor its memory again, with nothing in it."""
        self._live[name].data = self._live[name].data.new_empty(self.shapes[name])

    def restore(self) -> None:
        """Bring every tensor back, bit for bit."""
        if self._file is not None:
            self._file.seek(0)
        for name, tensor in self._live.items():
            self.make(name)
            if self._file is None:
                tensor.data.copy_(self._host[name])
            else:
                read = self._file.readinto(raw(tensor.data))
                assert read == tensor.nbytes
        self.forget()

    def forget(self) -> None:
        """They are not needed any more."""
        self._host.clear()
        if self._file is not None:
            self._file.close()


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, in place."""
    return tensor.view(-1).view(torch.uint8).numpy().data
