"""Whether the replicas hold the trainer's weights, bit for bit: checksums of every tensor, compared by name."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshy.generation.checksum import checksums


class WeightsDiffer(RuntimeError):
    """A replica holds other weights than the trainer."""


def expected_checksums(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, str]:
    """Of the tensors, cast to dtype, one after another."""
    return checksums((name, tensor.to(dtype)) for name, tensor in tensors)


def refuse_differences(expected: Mapping[str, str], reported: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """reported: by URL, the `ranks` of `/weights_checker`. Raises WeightsDiffer naming replica and tensors."""
    for url, ranks in reported.items():
        sums = ranks[0]["checksums"]
        wrong = sorted(name for name in sums if sums[name] != expected.get(name))
        if wrong:
            raise WeightsDiffer(f"{url} holds other weights than the trainer: {len(wrong)} tensors, e.g. {wrong[:3]}")
