"""What an engine should report as checksums of its tensors, computed from the checkpoint's, one tensor at a time.

expected = ExpectedChecksums(config, layout_of(server_info, config, dtype))    # config: the model's config.json
for name, tensor in hf_tensors: expected.add(name, tensor)
wrong = expected.compare(answer["ranks"])                                      # of /weights_checker; [] is well
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from meshy.generation.checksum import CpuChecksum, bytes_of
from meshy.generation.gpu_checksum import GpuChecksum
from meshy.generation.layout import Layout, Place, place, second_name, shard

CHECKSUMS = "checksums.json"
"""The file beside weights that says what engines should report which load them."""


class Checksum(Protocol):
    def update(self, raw: Tensor) -> None: ...

    def hexdigest(self) -> str: ...


@dataclass(slots=True)
class _Whole:
    """An engine's tensor that comes in parts. ranks: one checksum for each."""

    ranks: list[Checksum]
    parts: int
    next: int = 0
    early: dict[int, tuple[Tensor, Place]] = field(default_factory=dict)


class ExpectedChecksums:
    """Holds no tensor that `add` was given, except a part that came before its predecessors."""

    def __init__(self, config: Mapping[str, Any], layout: Layout) -> None:
        self._config = config
        self._layout = layout
        self._kind: type[Checksum] = GpuChecksum if layout.fused and layout.on_gpu else CpuChecksum
        self._tensors: dict[str, _Whole] = {}

    @torch.no_grad()
    def add(self, name: str, tensor: Tensor) -> None:
        """One tensor of the checkpoint, whole, under its Hugging Face name."""
        if second_name(name, self._config):
            return
        where = place(name) if self._layout.fused else Place(name)
        whole = self._tensors.get(where.name)
        if whole is None:
            whole = _Whole([self._kind() for _ in range(self._layout.tp)], where.parts)
            self._tensors[where.name] = whole
        whole.early[where.part] = (tensor.detach().to(self._layout.dtype), where)
        while whole.next in whole.early:
            self._take(whole, *whole.early.pop(whole.next))
            whole.next += 1

    def _take(self, whole: _Whole, tensor: Tensor, where: Place) -> None:
        for rank, checksum in enumerate(whole.ranks):
            mine, zeros = shard(tensor, where.cut, rank, self._layout.tp, self._config)
            checksum.update(bytes_of(mine))
            if zeros:
                checksum.update(bytes_of(tensor.new_zeros(zeros, *tensor.shape[1:])))

    def of_rank(self, rank: int) -> dict[str, str]:
        """{tensor's name in the engine: checksum}, of those that have come whole."""
        return {
            name: whole.ranks[rank].hexdigest() for name, whole in self._tensors.items() if whole.next == whole.parts
        }

    def by_rank(self) -> list[dict[str, str]]:
        """`of_rank` for each rank of the engine."""
        return [self.of_rank(rank) for rank in range(self._layout.tp)]

    def compare(self, ranks: Sequence[Mapping[str, Any]]) -> list[str]:
        """The tensors in which an engine differs, each with what is wrong: []. ranks: as it reports them."""
        return compare(self.by_rank(), ranks)


def compare(expected: Sequence[Mapping[str, str]], ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """The tensors in which an engine differs, each with what is wrong: []. expected: by rank, each tensor's checksum.
    ranks: as the engine reports them."""
    if len(ranks) != len(expected):
        return [f"{len(ranks)} ranks answered, not {len(expected)}"]
    wrong = []
    for rank, (wanted, told) in enumerate(zip(expected, ranks, strict=True)):
        reported = told["checksums"]
        at = f" on rank {rank}" if len(expected) > 1 else ""
        for name in sorted(wanted.keys() | reported.keys()):
            if name not in reported:
                wrong.append(f"{name}{at} (not reported)")
            elif name not in wanted:
                wrong.append(f"{name}{at} (unknown to the trainer)")
            elif wanted[name] != reported[name]:
                wrong.append(f"{name}{at}")
    return wrong


def write_expected(folder: Path, expected: Mapping[str, ExpectedChecksums]) -> None:
    """Leaves, beside the weights in a folder, what each engine should report that loads them, by URL."""
    (folder / CHECKSUMS).write_text(json.dumps({url: sums.by_rank() for url, sums in expected.items()}))


def read_expected(folder: Path, url: str) -> list[dict[str, str]] | None:
    """What the engine at that URL should report of these weights, by rank; None where nobody has left it."""
    file = folder / CHECKSUMS
    told: dict[str, list[dict[str, str]]] = json.loads(file.read_text()) if file.is_file() else {}
    return told.get(url)
