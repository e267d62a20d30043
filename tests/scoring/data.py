"""Rows to be scored, from a seed."""

import torch

from meshy.titan.micro_batch import Sample
from tests.training.models import VOCAB

CANDIDATES, K, TEMPERATURE = "candidates", 5, 0.7


def make_samples(count: int = 12, seed: int = 3) -> list[Sample]:
    """Rows of 4 to 40 tokens with five candidates at each; among them a one-token answer, gaps in the mask (a tool's
    turn) and a row of which the policy wrote nothing."""
    g = torch.Generator().manual_seed(seed)
    samples = []
    for number in range(count):
        length = int(torch.randint(4, 41, (1,), generator=g))
        mask = torch.arange(length) >= int(torch.randint(1, length - 1, (1,), generator=g))
        if number == 1:
            mask = torch.arange(length) == length - 1
        if number == 2:
            mask[:] = False
        if number == 3:
            mask &= torch.rand(length, generator=g) > 0.4
            mask[-1] = True
        tokens = torch.randint(0, VOCAB, (length,), generator=g)
        ids = torch.randint(0, VOCAB, (length, K), generator=g, dtype=torch.int32)
        samples.append(Sample(tokens, mask, {CANDIDATES: ids}))
    return samples
