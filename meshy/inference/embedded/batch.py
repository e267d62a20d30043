"""The flat row of tokens that one step feeds to the model.

    [ one token per running request | prompts of 16 tokens | prompts of 32 tokens | ... | padding to 4 ]

Linear layers and norms see all tokens of a step at once; only attention looks at the structure. Equal prompts (a
group's members) are fed once. Every prompt is padded on the right to a multiple of 16 and is attended only with prompts
of the same padded length, so that the bits of a request do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshy.inference.embedded.request import Request

PREFILL_MULTIPLE = 16
MIN_ROWS = 4  # a linear layer takes another kernel, with other rounding, below four rows

Ints = npt.NDArray[np.int64]


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class PromptBlock(NamedTuple):
    """`prompts` distinct prompts of `length` tokens each (padding included), from flat row `start` on."""

    start: int
    prompts: int
    length: int


class InputRows(NamedTuple):
    """The logits that score a prompt: rows [start, stop) of the logits predict its tokens from position `first` on."""

    request: Request
    first: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class FlatBatch:
    tokens: Ints  # [rows]
    positions: Ints  # [rows]
    n_decode: int
    blocks: list[PromptBlock]
    write_row: Ints  # [writes]: the key and value of this flat row ...
    write_slot: Ints  # [writes]: ... go to this slot ...
    write_position: Ints  # [writes]: ... at this position
    logit_rows: Ints  # [logits]: flat rows whose logits are wanted: the distinct sampling rows, then the input rows
    logit_of: Ints  # [requests]: which of those logits each request samples from (decode, then prefill)
    input_rows: list[InputRows]


def flatten(decode: Sequence[Request], prefill: Sequence[Request]) -> FlatBatch:
    """Lay out one step: `decode` holds slots 0.., `prefill` the slots after them."""
    n_decode = len(decode)
    lengths = [request.length for request in decode]
    tokens: list[int] = [request.last_token for request in decode]
    decode_rows = np.arange(n_decode, dtype=np.int64)
    positions = [np.array(lengths, dtype=np.int64) - 1]
    write_row, write_slot, write_position = [decode_rows], [decode_rows], [positions[0]]
    blocks, starts = _pack_prompts(prefill, tokens, positions)

    last_rows: dict[int, int] = {}  # flat row -> its place among the logits
    logit_rows: list[int] = list(range(n_decode))
    logit_of: list[int] = list(range(n_decode))
    for offset, (request, start) in enumerate(zip(prefill, starts, strict=True)):
        span = np.arange(request.length, dtype=np.int64)
        write_row.append(start + span)
        write_slot.append(np.full(request.length, n_decode + offset, dtype=np.int64))
        write_position.append(span)
        last = start + request.length - 1
        if last not in last_rows:
            last_rows[last] = len(logit_rows)
            logit_rows.append(last)
        logit_of.append(last_rows[last])
    input_rows = _score_inputs(prefill, starts, logit_rows)

    padding = max(0, MIN_ROWS - len(tokens))
    tokens.extend([0] * padding)
    positions.append(np.zeros(padding, dtype=np.int64))
    logit_rows.extend([0] * max(0, MIN_ROWS - len(logit_rows)))
    return FlatBatch(
        tokens=np.array(tokens, dtype=np.int64),
        positions=np.concatenate(positions),
        n_decode=n_decode,
        blocks=blocks,
        write_row=np.concatenate(write_row),
        write_slot=np.concatenate(write_slot),
        write_position=np.concatenate(write_position),
        logit_rows=np.array(logit_rows, dtype=np.int64),
        logit_of=np.array(logit_of, dtype=np.int64),
        input_rows=input_rows,
    )


def _pack_prompts(
    prefill: Sequence[Request], tokens: list[int], positions: list[Ints]
) -> tuple[list[PromptBlock], list[int]]:
    """Append the distinct prompts, grouped by padded length. Returns the blocks and each request's first flat row."""
    prompts = [tuple(request.tokens) for request in prefill]
    by_length: dict[int, dict[tuple[int, ...], int]] = {}
    for prompt in prompts:
        by_length.setdefault(round_up(len(prompt), PREFILL_MULTIPLE), {}).setdefault(prompt, 0)
    blocks = []
    for length, distinct in sorted(by_length.items()):
        blocks.append(PromptBlock(len(tokens), len(distinct), length))
        for prompt in distinct:
            distinct[prompt] = len(tokens)
            tokens.extend(prompt)
            tokens.extend([0] * (length - len(prompt)))
        positions.append(np.tile(np.arange(length, dtype=np.int64), len(distinct)))
    starts = [by_length[round_up(len(prompt), PREFILL_MULTIPLE)][prompt] for prompt in prompts]
    return blocks, starts


def _score_inputs(prefill: Sequence[Request], starts: Sequence[int], logit_rows: list[int]) -> list[InputRows]:
    """Ask for the logits that predict prompt tokens, where a request wants them."""
    rows = []
    for request, start in zip(prefill, starts, strict=True):
        if request.scores_input:
            assert request.logprob_options.start is not None
            first = request.logprob_options.start + 1
            at = len(logit_rows)
            logit_rows.extend(range(start + first - 1, start + len(request.prompt) - 1))
            rows.append(InputRows(request, first, at, len(logit_rows)))
    return rows
