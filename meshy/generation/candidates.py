"""The likeliest tokens at each place where the model wrote one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """ids: the k likeliest tokens at each place. logprobs: log softmax(logits / temperature) of them, descending,
    without top-p or top-k."""

    ids: Int32[np.ndarray, "tokens k"]
    logprobs: Float32[np.ndarray, "tokens k"]

    def __len__(self) -> int:
        return len(self.ids)


def joined(parts: Sequence[Candidates]) -> Candidates:
    """Those of all parts, one after the other: at least one part, all of one k."""
    if len(parts) == 1:
        return parts[0]
    ids, logprobs = [part.ids for part in parts], [part.logprobs for part in parts]
    return Candidates(np.concatenate(ids), np.concatenate(logprobs))


def spread(candidates: Candidates, mask: Sequence[bool]) -> Candidates:
    """As many places as `mask` has: the candidates in order where it is true, 0 elsewhere."""
    where = np.array(mask, dtype=bool)
    shape = len(where), candidates.ids.shape[1]
    ids, logprobs = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.float32)
    ids[where], logprobs[where] = candidates.ids, candidates.logprobs
    return Candidates(ids, logprobs)


def read_candidates(rows: Sequence[Sequence[Sequence[Any]]] | None, tokens: int, k: int) -> Candidates:
    """From SGLang's `output_top_logprobs`: for each token, k entries [log-prob, id, text]. Raises ValueError where they
    are not that, saying what came instead."""
    if not tokens:  # SGLang gives a row all the same
        return Candidates(np.empty((0, k), dtype=np.int32), np.empty((0, k), dtype=np.float32))
    rows = rows or ()
    if len(rows) != tokens:
        raise ValueError(f"candidates for {len(rows)} of {tokens} tokens")
    for place, row in enumerate(rows):
        if row is None or len(row) != k:
            raise ValueError(f"{len(row or ())} candidates for token {place} of {tokens}")
    if set(map(len, chain.from_iterable(rows))) != {3}:
        raise ValueError("candidates that are no [log-prob, id, text]")
    # Thousands in a response: what JSON made of them is gathered in C, without an object more for any of them.
    flat = list(chain.from_iterable(chain.from_iterable(rows)))
    logprobs, ids = np.array(flat[0::3]), np.array(flat[1::3])
    if ids.dtype.kind != "i" or ids.min() < 0 or ids.max() >= 2**31:
        raise ValueError("candidates whose ids are no token ids")
    if logprobs.dtype.kind not in "fi" or not np.isfinite(logprobs).all():
        raise ValueError("candidates without a log-prob: is one of them NaN?")
    shape = tokens, k
    return Candidates(ids.astype(np.int32).reshape(shape), logprobs.astype(np.float32).reshape(shape))
