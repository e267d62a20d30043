"""From samples to the tensors that a model and a loss eat. Pure; who gets what is said in `sharing.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One row of the queue.

    tokens: prompt and response. loss_mask: true on tokens that the policy wrote; the first token cannot be one, since
    nothing predicts it. columns: per-token columns by name, each as long as `tokens`.
    """

    tokens: Int[Tensor, " length"]
    loss_mask: Bool[Tensor, " length"]
    columns: Mapping[str, Tensor]


@dataclass(frozen=True)
class MicroBatch:
    """Padded rows, or one packed row; and, flat, what the loss needs of each response token.

    documents: lengths of the packed row's documents (padding is the last one); None for padded rows.
    select: index into the flattened [rows * width] of the position that predicts each response token.
    sequence: index of the response token's sample within this micro-batch, ascending.
    """

    tokens: Int[Tensor, "rows width"]
    positions: Int[Tensor, "rows width"] | None
    documents: tuple[int, ...] | None
    select: Int[Tensor, " selected"]
    targets: Int[Tensor, " selected"]
    sequence: Int[Tensor, " selected"]
    columns: Mapping[str, Tensor]

    def to(self, device: torch.device) -> "MicroBatch":
        move = {name: value.to(device, non_blocking=True) for name, value in self.columns.items()}
        positions = None if self.positions is None else self.positions.to(device, non_blocking=True)
        return MicroBatch(
            tokens=self.tokens.to(device, non_blocking=True),
            positions=positions,
            documents=self.documents,
            select=self.select.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            sequence=self.sequence.to(device, non_blocking=True),
            columns=move,
        )


def pad(samples: Sequence[Sample], names: Sequence[str] = (), multiple: int = 1) -> MicroBatch:
    """One row a sample, padded on the right to the longest, rounded up to `multiple`. names: of the columns to carry.

    No sample at all gives a row of padding: a rank without work still runs forward and backward with the others."""
    width = _round_up(max((len(s.tokens) for s in samples), default=1), multiple)
    tokens = torch.zeros(max(len(samples), 1), width, dtype=torch.long)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample.tokens)] = sample.tokens
    offsets = [row * width for row in range(len(samples))]
    return _assemble(samples, names, tokens, None, None, offsets)


def pack(samples: Sequence[Sample], names: Sequence[str] = (), multiple: int = 1) -> MicroBatch:
    """As `pad`, but all samples one after another in one row, padded at the end with a document of its own."""
    lengths = [len(s.tokens) for s in samples]
    used = sum(lengths)
    width = _round_up(max(used, 1), multiple)
    tokens = torch.zeros(1, width, dtype=torch.long)
    positions = torch.zeros(1, width, dtype=torch.long)  # padding: single-token documents at position 0
    offsets, start = [], 0
    for sample, length in zip(samples, lengths, strict=True):
        tokens[0, start : start + length] = sample.tokens
        positions[0, start : start + length] = torch.arange(length)
        offsets.append(start)
        start += length
    documents = (*lengths, width - used) if width > used else tuple(lengths)
    return _assemble(samples, names, tokens, positions, documents, offsets)


def flat_index(samples: Sequence[Sample], batch: MicroBatch, at: Sequence[int]) -> Int[Tensor, " samples"]:
    """Index into the flattened [rows * width] of the batch of one token of each of its samples, on the batch's device:
    of the `at[i]`-th of sample i, counted from 0. As `select`, it asks the model for what it says there."""
    lengths = torch.tensor([len(sample.tokens) for sample in samples], dtype=torch.long)
    if batch.documents is None:
        starts = torch.arange(len(samples)) * batch.tokens.shape[1]
    else:
        starts = lengths.cumsum(0) - lengths
    return (starts + torch.tensor(at, dtype=torch.long)).to(batch.tokens.device)


def _assemble(
    samples: Sequence[Sample],
    names: Sequence[str],
    tokens: Tensor,
    positions: Tensor | None,
    documents: tuple[int, ...] | None,
    offsets: Sequence[int],
) -> MicroBatch:
    select, targets, sequence = [], [], []
    columns: dict[str, list[Tensor]] = {name: [] for name in names}
    for index, (sample, offset) in enumerate(zip(samples, offsets, strict=True)):
        written = sample.loss_mask.nonzero().flatten()
        select.append(written + (offset - 1))
        targets.append(sample.tokens[written])
        sequence.append(torch.full_like(written, index))
        for name, parts in columns.items():
            parts.append(sample.columns[name][written])
    empty = torch.zeros(0, dtype=torch.long)
    return MicroBatch(
        tokens=tokens,
        positions=positions,
        documents=documents,
        select=torch.cat(select) if select else empty,
        targets=torch.cat(targets) if targets else empty,
        sequence=torch.cat(sequence) if sequence else empty,
        columns={name: torch.cat(parts) if parts else torch.zeros(0) for name, parts in columns.items()},
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
