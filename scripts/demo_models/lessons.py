"""Demonstrations as padded batches, from short numbers to long ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from meshy.data.addition import draw_pair
from scripts.demo_models.answers import Answer, careful
from scripts.demo_models.tokenizer import prompt_of

IGNORED = -100
MAX_DIGITS = 6  # one more than the task asks

Batch = tuple[Int[Tensor, "batch length"], Tensor]
"""`input_ids` and `labels`."""


def batches(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, size: int, max_digits: int, demonstrate: Answer
) -> Iterator[Batch]:
    """Endless padded `input_ids` and `labels`, int64 [size, length]; labels cover the response and its end.

    Rows of similar length share a batch, which halves the padding.
    """
    while True:
        pool = []
        for _ in range(16 * size):
            a, b = draw_pair(rng, max_digits, held_out=False)
            prompt = tokenizer.encode(prompt_of(a, b))
            pool.append((prompt, [*tokenizer.encode(demonstrate(a, b, rng)), tokenizer.eos_token_id]))
        pool.sort(key=lambda row: len(row[0]) + len(row[1]))
        starts = list(range(0, len(pool), size))
        rng.shuffle(starts)
        for start in starts:
            rows = pool[start : start + size]
            labels = padded([[IGNORED] * len(prompt) + response for prompt, response in rows], IGNORED)
            yield padded([prompt + response for prompt, response in rows], tokenizer.pad_token_id), labels


def padded(rows: list[list[int]], filler: int) -> Int[Tensor, "batch length"]:
    """int64, filled up on the right."""
    length = max(map(len, rows))
    return torch.tensor([row + [filler] * (length - len(row)) for row in rows])


def curriculum(steps: int, max_digits: int) -> Iterator[int]:
    """The most digits of each step's numbers: from 2 upwards, all of them after four tenths of the way."""
    for step in range(steps):
        yield min(max_digits, 2 + step * (max_digits - 1) * 10 // (4 * steps))


def lessons(tokenizer: PreTrainedTokenizerFast, rng: random.Random, size: int, steps: int) -> Iterator[Batch]:
    """Batches of careful demonstrations along the curriculum."""
    for digits, times in itertools.groupby(curriculum(steps, MAX_DIGITS)):
        stream = batches(tokenizer, rng, size, digits, careful)
        for _ in times:
            yield next(stream)
