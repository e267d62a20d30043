"""Columns on the wire: many rows of one column travel as one flat tensor (or one list), not as a tensor a row.

A wire column is a dict: `values`, the rows' entries one after the other (a tensor, or a list of str or of pickles), and
`sizes`, an [n, d] int64 tensor of the rows' shapes, None where each row is one value.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from meshy.columns import Column
from meshy.queue.errors import ColumnError

TOKENS = "tokens"
"""In a partition with this column, every jagged column has its length: entry t describes tokens[t]."""

INLINE_BYTES = 65536
"""pyzmq copies frames up to this size anyway."""

_KINDS_OF_LISTS = {"bool": "b", "int64": "i", "int32": "i"}
"""Python values that a column takes, by numpy's letter for them; float columns take "f" and "i"."""


@dataclass(frozen=True, slots=True)
class Packed:
    """One column of n rows."""

    values: Tensor | list[Any]
    sizes: Int64[Tensor, "n d"] | None = None

    def __len__(self) -> int:
        return len(self.values) if self.sizes is None else len(self.sizes)

    def wire(self) -> dict[str, Any]:
        values = _to_wire(self.values) if isinstance(self.values, Tensor) else self.values
        return {"values": values, "sizes": None if self.sizes is None else _to_wire(self.sizes)}

    def rows(self) -> list[Any]:
        """The entries of each row: 0-d tensors, [L] or [L, K] tensors (views of one), strings or pickles."""
        if self.sizes is None:
            return list(self.values.unbind()) if isinstance(self.values, Tensor) else self.values
        assert isinstance(self.values, Tensor)
        flat = torch.split(self.values, self.sizes.prod(dim=1).tolist())
        if self.sizes.shape[1] == 1:
            return list(flat)
        return [row.view(shape) for row, shape in zip(flat, self.sizes.tolist(), strict=True)]

    def select(self, positions: Sequence[int]) -> Packed:
        if self.sizes is None and isinstance(self.values, Tensor):
            return Packed(self.values[torch.tensor(positions)])
        rows = self.rows()
        return join([rows[i] for i in positions])


def from_wire(column: Mapping[str, Any]) -> Packed:
    return Packed(_from_wire(column["values"]), _from_wire(column["sizes"]))


def _to_wire(tensor: Tensor) -> Tensor | dict[str, Any]:
    """A small tensor goes into the message's first frame: every further frame costs more than copying some bytes."""
    if tensor.nbytes > INLINE_BYTES or not tensor.numel():
        return tensor
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "bytes": data}


def _from_wire(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return torch.frombuffer(bytearray(value["bytes"]), dtype=getattr(torch, value["dtype"])).view(value["shape"])


def join(rows: Sequence[Any]) -> Packed:
    """Rows as `Packed.rows` gives them, packed again. At least one row."""
    first = rows[0]
    if not isinstance(first, Tensor):
        return Packed(list(rows))
    if first.dim() == 0:
        return Packed(torch.stack(list(rows)))
    flat = torch.cat([row.reshape(-1) for row in rows])
    return Packed(flat, torch.tensor([row.shape for row in rows], dtype=torch.int64))


def pack(columns: Mapping[str, Column], values: Mapping[str, Sequence[Any]]) -> dict[str, Packed]:
    """Pack the values of some declared columns, all of the same number of rows.

    Raises ColumnError for a wrong dtype, kind or length, naming the column; nothing is cast that would lose anything.
    """
    packed = {name: _pack(columns[name], rows) for name, rows in values.items()}
    lengths = {name: len(column) for name, column in packed.items()}
    if len(set(lengths.values())) > 1:
        raise ColumnError(f"columns of different numbers of rows: {lengths}; give every column one entry a row")
    if TOKENS in packed:
        check_token_lengths(packed, packed[TOKENS].sizes, packed["uid"].values if "uid" in packed else None)
    return packed


def check_token_lengths(
    packed: Mapping[str, Packed], tokens: Int64[Tensor, "n 1"] | None, uids: Sequence[str] | Tensor | None = None
) -> None:
    """Raise ColumnError where a row of a jagged column is not as long as the row's tokens."""
    assert tokens is not None
    for name, column in packed.items():
        if column.sizes is None or torch.equal(column.sizes[:, 0], tokens[:, 0]):
            continue
        row = int((column.sizes[:, 0] != tokens[:, 0]).nonzero()[0])
        raise ColumnError(
            f"column {name!r} has {int(column.sizes[row, 0])} entries in row {uids[row] if uids else row!r}, whose "
            f"{TOKENS} are {int(tokens[row, 0])}; entry t must describe {TOKENS}[t]"
        )


def _pickled(column: Column) -> bool:
    return column.kind == "object" or column.dtype == "object" or (column.dtype == "str" and column.kind != "scalar")


def _pack(column: Column, rows: Sequence[Any]) -> Packed:
    if _pickled(column):
        return Packed([pickle.dumps(row, protocol=pickle.HIGHEST_PROTOCOL) for row in rows])
    if column.dtype == "str":
        values = list(rows)
        wrong = next((row for row in values if not isinstance(row, str)), None)
        if wrong is not None:
            raise ColumnError(f"column {column.name!r} takes str, but got {type(wrong).__name__} {wrong!r}")
        return Packed(values)
    if column.kind == "scalar":
        return _pack_scalars(column, rows)
    return _pack_jagged(column, rows, dims=1 if column.kind == "jagged" else 2)


def _pack_scalars(column: Column, rows: Sequence[Any]) -> Packed:
    one_tensor_a_row = isinstance(rows, (list, tuple)) and rows and isinstance(rows[0], Tensor)
    values = _tensor(column, torch.stack(tuple(rows)) if one_tensor_a_row else rows)
    if values.dim() != 1:
        raise ColumnError(f"column {column.name!r} takes one value a row, but got shape {list(values.shape[1:])} a row")
    return Packed(values)


def _pack_jagged(column: Column, rows: Sequence[Any], dims: int) -> Packed:
    rows = list(rows)
    if all(isinstance(row, (list, tuple)) for row in rows) and dims == 1:
        flat = _tensor(column, list(itertools.chain.from_iterable(rows)))
        if flat.dim() != 1:
            raise ColumnError(f"column {column.name!r} takes one dimension a row, but got a list of lists")
        return Packed(flat, torch.tensor([len(row) for row in rows], dtype=torch.int64)[:, None])
    tensors = [_tensor(column, row, dims) for row in rows]
    for index, row in enumerate(tensors):
        if row.dim() != dims:
            raise ColumnError(f"column {column.name!r} is {column.kind}, but row {index} has shape {list(row.shape)}")
    if not tensors:
        return Packed(torch.empty(0, dtype=getattr(torch, column.dtype)), torch.empty(0, dims, dtype=torch.int64))
    return join(tensors)


def _tensor(column: Column, values: Any, dims: int = 1) -> Tensor:
    """Values as a CPU tensor of the column's dtype. Tensors and arrays must have it; Python numbers must fit it."""
    dtype = getattr(torch, column.dtype)
    if isinstance(values, np.ndarray):
        values = torch.from_numpy(np.ascontiguousarray(values))
    if isinstance(values, Tensor):
        if values.dtype != dtype:
            raise ColumnError(
                f"column {column.name!r} is {column.dtype}, but got {str(values.dtype).removeprefix('torch.')}; "
                "convert it where it is made"
            )
        return values.detach().cpu()
    array = _array(column, values)
    if array.size == 0:
        return torch.empty(array.shape if array.ndim >= dims else (0,) * dims, dtype=dtype)
    if column.dtype == "int32" and (array.min() < -(2**31) or array.max() >= 2**31):
        raise ColumnError(f"column {column.name!r} is int32, but got {array.min()} .. {array.max()}")
    return torch.from_numpy(array).to(dtype)


def _array(column: Column, values: Iterable[Any]) -> np.ndarray:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:  # rows of different lengths, or integers beyond 64 bits
        raise ColumnError(f"column {column.name!r} is {column.type}: {error}") from error
    if array.size and array.dtype.kind not in _KINDS_OF_LISTS.get(column.dtype, "fi"):
        raise ColumnError(
            f"column {column.name!r} is {column.dtype}, but got {array.dtype} values such as {values!r:.80}"
        )
    return array


def unpack(column: Column, packed: Packed) -> Tensor | list[Any]:
    """What `read` returns: a 1-D tensor of scalars, a list of [L] or [L, K] tensors, a list of str or objects.

    The tensors are writable and share no memory with the message that brought them.
    """
    if isinstance(packed.values, Tensor):
        packed = Packed(packed.values.clone(), packed.sizes)
        return packed.rows() if packed.sizes is not None else packed.values
    if _pickled(column):
        return [pickle.loads(row) for row in packed.values]
    return packed.values


def unpack_sparse(column: Column, rows: Sequence[Any]) -> list[Any]:
    """What `read` returns for a column that rows may lack: rows as `Packed.rows` gives them or None, unpacked one by
    one; scalars are Python numbers."""
    there = [row for row in rows if row is not None]
    if not there:
        return list(rows)
    packed = join(there)
    if packed.sizes is not None:
        unpacked = iter(packed.rows())  # views of what `join` has just copied
    elif isinstance(packed.values, Tensor):
        unpacked = iter(packed.values.tolist())
    else:
        unpacked = iter(unpack(column, packed))
    return [None if row is None else next(unpacked) for row in rows]


def empty(column: Column) -> Tensor | list[Any]:
    """What `read` returns for no rows."""
    if column.kind != "scalar" or column.dtype in ("str", "object"):
        return []
    return torch.empty(0, dtype=getattr(torch, column.dtype))
