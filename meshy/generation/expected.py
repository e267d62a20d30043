"""What an engine should report as checksums of its tensors, computed from the checkpoint's, one tensor at a time.

expected = ExpectedChecksums(config, layout_of(server_info, config, dtype))    # config: the model's config.json
for name, tensor in hf_tensors: expected.add(name, tensor)
wrong = expected.compare(answer["ranks"])                                      # of /weights_checker; [] is well
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from meshy.generation.checksum import CpuChecksum, bytes_of
from meshy.generation.gpu_checksum import GpuChecksum
from meshy.generation.layout import Layout, Place, place, second_name, shard


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

    def compare(self, ranks: Sequence[Mapping[str, Any]]) -> list[str]:
        """The tensors in which an engine differs, each with what is wrong: []. ranks: as it reports them."""
        if len(ranks) != self._layout.tp:
            return [f"{len(ranks)} ranks answered, not {self._layout.tp}"]
        wrong = []
        for rank, told in enumerate(ranks):
            expected, reported = self.of_rank(rank), told["checksums"]
            at = f" on rank {rank}" if self._layout.tp > 1 else ""
            for name in sorted(expected.keys() | reported.keys()):
                if name not in reported:
                    wrong.append(f"{name}{at} (not reported)")
                elif name not in expected:
                    wrong.append(f"{name}{at} (unknown to the trainer)")
                elif expected[name] != reported[name]:
                    wrong.append(f"{name}{at}")
        return wrong
