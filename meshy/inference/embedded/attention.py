"""Attention over the flat row: one query per running request against its slot, whole prompts against themselves.

It is given to `transformers` as an attention implementation of its own (`ATTENTION`), so any model whose attention goes
through that interface can be served unchanged.

On CPU the result of a row is bit-equal whatever stands in the other rows (measured with torch 2.13 in fp32): scores are
independent of the number of keys if that is a multiple of 32, and the weighted sum of values is taken in blocks of 128
keys, since the matrix product splits longer sums in a way that depends on their length. Masked keys add exact zeros.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import AttentionInterface

from meshy.inference.embedded.batch import FlatBatch, Ints, PromptBlock, round_up
from meshy.inference.embedded.cache import KEY_MULTIPLE, SlotCache

ATTENTION = "meshy_slots"
VALUE_BLOCK = 128
ROW_CHUNK = 32
WHOLE_IS_FINE = 1.25  # all rows at once if that reads at most this many times the keys


class SlotAttention:
    """The attention of one step; made by the runner, called once per layer."""

    def __init__(self, batch: FlatBatch, cache: SlotCache, device: torch.device) -> None:
        self._cache = cache
        self._device = device
        self._blocks = batch.blocks
        self._decode_lengths = batch.positions[: batch.n_decode] + 1
        self._write = batch
        self._write_row = torch.from_numpy(batch.write_row).to(device)
        self._indices: dict[int, Tensor] = {}
        self._masks: dict[int | None, list[tuple[int, int, int, Tensor]]] = {}
        # Without prompts the flat rows are the writes: no gather.
        self._plain = not batch.blocks

    def __call__(
        self,
        layer: int,
        query: Float[Tensor, "1 heads rows dim"],
        key: Float[Tensor, "1 kv_heads rows dim"],
        value: Float[Tensor, "1 kv_heads rows dim"],
        scale: float,
        window: int | None,
    ) -> Float[Tensor, "1 rows heads dim"]:
        self._store(layer, key[0], value[0])
        heads, rows = query.shape[1], query.shape[2]
        out = value.new_zeros(rows, heads, value.shape[3])
        for start, stop, keys, mask in self._decode_chunks(window):
            out[start:stop] = attend_slots(
                query[0, :, start:stop],
                self._cache.keys[layer][start:stop, :, :keys],
                self._cache.values[layer][start:stop, :, :keys],
                mask,
                scale,
            )
        for block in self._blocks:
            stop = block.start + block.prompts * block.length
            out[block.start : stop] = attend_prompts(
                query[0, :, block.start : stop],
                key[0, :, block.start : stop],
                value[0, :, block.start : stop],
                block,
                scale,
                window,
            )
        return out[None]

    def _store(self, layer: int, key: Float[Tensor, "kv rows dim"], value: Float[Tensor, "kv rows dim"]) -> None:
        heads = key.shape[0]
        n = len(self._write_row)
        if self._plain:
            key, value = key[:, :n], value[:, :n]
        else:
            key, value = key.index_select(1, self._write_row), value.index_select(1, self._write_row)
        self._cache.write(layer, self._index(heads), key.reshape(heads * n, -1), value.reshape(heads * n, -1), heads)

    def _index(self, heads: int) -> Int64[Tensor, " heads*writes"]:
        """Flat cache places of the writes; computed once per step, since layers share their number of heads."""
        if heads not in self._indices:
            head = np.arange(heads, dtype=np.int64)[:, None]
            place = (self._write.write_slot * heads + head) * self._cache.length + self._write.write_position
            self._indices[heads] = torch.from_numpy(place.reshape(-1)).to(self._device)
        return self._indices[heads]

    def _decode_chunks(self, window: int | None) -> list[tuple[int, int, int, Tensor]]:
        """(first row, last row + 1, keys, additive mask [rows, 1, 1, keys]) of each chunk of decode rows."""
        if window not in self._masks:
            self._masks[window] = [
                (start, stop, keys, self._mask(self._decode_lengths[start:stop], keys, window))
                for start, stop, keys in chunk_rows(self._decode_lengths)
            ]
        return self._masks[window]

    def _mask(self, lengths: Ints, keys: int, window: int | None) -> Float[Tensor, "rows 1 1 keys"]:
        place = np.arange(keys)
        hidden = place >= lengths[:, None]
        if window is not None:
            hidden |= place < lengths[:, None] - window
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
        return torch.from_numpy(mask[:, None, None]).to(self._device)


def chunk_rows(lengths: Ints) -> list[tuple[int, int, int]]:
    """(first row, last row + 1, keys) of the pieces in which decode rows are attended.

    Each piece reads as many keys as its longest row has; where pieces would hardly save any, there is only one.
    """
    chunks = []
    for start in range(0, len(lengths), ROW_CHUNK):
        piece = lengths[start : start + ROW_CHUNK]
        chunks.append((start, start + len(piece), round_up(int(piece.max()), KEY_MULTIPLE)))
    longest = max((keys for *_, keys in chunks), default=0)
    reads = sum((stop - start) * keys for start, stop, keys in chunks)
    if len(lengths) * longest <= WHOLE_IS_FINE * reads:
        return [(0, len(lengths), longest)] if longest else []
    return chunks


def attend_slots(
    query: Float[Tensor, "heads rows dim"],
    keys: Float[Tensor, "rows kv_heads keys dim"],
    values: Float[Tensor, "rows kv_heads keys v_dim"],
    mask: Float[Tensor, "rows 1 1 keys"],
    scale: float,
) -> Float[Tensor, "rows heads v_dim"]:
    """One query per row against that row's keys; the query heads that share a key head go together."""
    heads, rows = query.shape[:2]
    kv_heads = keys.shape[1]
    grouped = query.unflatten(0, (kv_heads, heads // kv_heads)).permute(2, 0, 1, 3)
    attend = _attend_exactly if query.device.type == "cpu" else _attend_fused
    return attend(grouped, keys, values, mask, scale).reshape(rows, heads, -1)


def _attend_fused(
    query: Float[Tensor, "rows kv_heads group dim"], keys: Tensor, values: Tensor, mask: Tensor, scale: float
) -> Float[Tensor, "rows kv_heads group v_dim"]:
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask.to(query.dtype), scale=scale)


def _attend_exactly(
    query: Float[Tensor, "rows kv_heads group dim"], keys: Tensor, values: Tensor, mask: Tensor, scale: float
) -> Float[Tensor, "rows kv_heads group v_dim"]:
    """The same with bits that do not depend on the number of keys read."""
    scores = torch.matmul(query, keys.transpose(2, 3)).mul_(scale).add_(mask)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    out = torch.matmul(weights[..., :VALUE_BLOCK], values[:, :, :VALUE_BLOCK])
    for start in range(VALUE_BLOCK, keys.shape[2], VALUE_BLOCK):
        stop = start + VALUE_BLOCK
        out += torch.matmul(weights[..., start:stop], values[:, :, start:stop])
    return out


def attend_prompts(
    query: Float[Tensor, "heads rows dim"],
    key: Float[Tensor, "kv_heads rows dim"],
    value: Float[Tensor, "kv_heads rows v_dim"],
    block: PromptBlock,
    scale: float,
    window: int | None,
) -> Float[Tensor, "rows heads v_dim"]:
    """Causal attention of `block.prompts` prompts of equal padded length, each within itself."""
    split = (block.prompts, block.length)
    q, k, v = (
        tensor.unflatten(1, split).transpose(0, 1) for tensor in (query, key, value)
    )  # [count, heads, length, .]
    gqa = q.shape[1] != k.shape[1]
    if window is None or window >= block.length:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    else:
        age = torch.arange(block.length, device=q.device)[:, None] - torch.arange(block.length, device=q.device)
        mask = (age >= 0) & (age < window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa)
    return out.transpose(1, 2).reshape(block.prompts * block.length, query.shape[0], -1)


def _forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    slots: SlotAttention,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"The embedded engine does not serve models whose attention uses {name!r}.")
    scale = scaling if scaling is not None else 1 / math.sqrt(query.shape[-1])
    layer = module.layer_idx
    assert isinstance(layer, int)
    return slots(layer, query, key, value, scale, sliding_window), None


AttentionInterface.register(ATTENTION, _forward)
