"""Drawing tokens: one uniform number per (seed, position), turned into a token by the inverse of the cumulative sum.

So a draw depends on nothing but the request's seed, its place in the sequence and its distribution: not on its
neighbours, and a request that is resumed from its prefix continues the same stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from meshy.inference.embedded.batch import Ints
from meshy.inference.embedded.request import Request

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a scrambling bijection of 64-bit integers."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(seeds: Ints, positions: Ints) -> np.ndarray:
    """One number in [0, 1) per (seed, position), as float64 [rows]."""
    stream = _mix(seeds.astype(np.uint64) + _GOLDEN)
    bits = _mix(stream + positions.astype(np.uint64) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """The seed of the index-th sample of one request; the first keeps the request's own."""
    if index == 0:
        return seed
    low = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    mixed = _mix(low ^ (np.array([index], dtype=np.uint64) * _GOLDEN))
    return int(mixed[0] >> np.uint64(1))


class SamplingBatch(NamedTuple):
    """The sampling parameters of a step's requests, as columns; rebuilt only when the requests change."""

    seeds: Ints
    temperature: Float[Tensor, "rows 1"] | None  # None: all 1
    greedy: Bool[Tensor, " rows"] | None  # None: none
    filtered: Int64[Tensor, " filtered"] | None  # rows with any of the following; None: none
    top_k: Int64[Tensor, "filtered 1"] | None
    top_p: Float[Tensor, "filtered 1"] | None
    min_p: Float[Tensor, "filtered 1"] | None

    @classmethod
    def of(cls, requests: Sequence[Request], device: torch.device) -> SamplingBatch:
        params = [request.params for request in requests]
        temperature = greedy = filtered = top_k = top_p = min_p = None
        if any(p.temperature != 1 for p in params):
            temperature = torch.tensor([[p.temperature or 1.0] for p in params], device=device)
        if any(p.greedy for p in params):
            greedy = torch.tensor([p.greedy for p in params], device=device)
        rows = [row for row, p in enumerate(params) if p.filtered]
        if rows:
            few = [params[row] for row in rows]
            filtered = torch.tensor(rows, device=device)
            top_k = torch.tensor([[p.top_k if p.top_k > 0 else 2**31] for p in few], device=device)
            top_p = torch.tensor([[p.top_p] for p in few], device=device)
            min_p = torch.tensor([[p.min_p] for p in few], device=device)
        # Seeds are any Python integers; the low 64 bits count.
        seeds = np.array([request.seed & 0xFFFFFFFFFFFFFFFF for request in requests], dtype=np.uint64)
        return cls(seeds.view(np.int64), temperature, greedy, filtered, top_k, top_p, min_p)


class Drawn(NamedTuple):
    tokens: Int64[Tensor, " rows"]
    logprobs: Float[Tensor, " rows"]
    all_logprobs: Float[Tensor, "rows vocab"]


def draw(logits: Float[Tensor, "rows vocab"], batch: SamplingBatch, positions: Ints) -> Drawn:
    """Sample one token per row.

    The distribution is softmax(logits / temperature). Each filter is judged on that distribution, and a token must
    pass all of them: `top_k`, the k most likely; `top_p`, the smallest set of most likely tokens whose mass reaches p;
    `min_p`, at least min_p times the most likely one's probability. Log-probs are those of the unfiltered distribution.
    """
    scaled = logits if batch.temperature is None else logits / batch.temperature
    logprobs = torch.log_softmax(scaled, dim=-1)
    probs = logprobs.exp()
    if batch.filtered is not None:
        assert batch.top_k is not None and batch.top_p is not None and batch.min_p is not None
        few = probs.index_select(0, batch.filtered)
        probs = probs.index_copy(0, batch.filtered, few * kept(few, batch.top_k, batch.top_p, batch.min_p))
    numbers = torch.from_numpy(uniform(batch.seeds, positions)).to(probs.device)
    tokens = invert(probs, numbers)
    if batch.greedy is not None:
        tokens = torch.where(batch.greedy, logits.argmax(dim=-1), tokens)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return Drawn(tokens, chosen, logprobs)


def kept(
    probs: Float[Tensor, "rows vocab"],
    top_k: Int64[Tensor, "rows 1"],
    top_p: Float[Tensor, "rows 1"],
    min_p: Float[Tensor, "rows 1"],
) -> Bool[Tensor, "rows vocab"]:
    """Which tokens pass all filters. Of equally likely tokens at a border, the lower ids pass."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    rank = torch.arange(probs.shape[1], device=probs.device)
    keep = (rank < top_k) & ((before < top_p) | (rank == 0)) & (ordered >= min_p * ordered[:, :1])
    return torch.zeros_like(keep).scatter_(1, order, keep)


def invert(weights: Float[Tensor, "rows vocab"], numbers: Float[Tensor, " rows"]) -> Int64[Tensor, " rows"]:
    """The token whose share of the cumulated, unnormalised weights holds each number in [0, 1); never of weight 0."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.minimum(numbers[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0]
