"""Samples of many shapes, from a seed."""

import torch

from meshy.titan.micro_batch import Sample
from tests.training.models import VOCAB


def make_samples(count: int = 12, seed: int = 0) -> dict[int, Sample]:
    """Rows of 2 to 40 tokens; among them one-token answers, gaps in the mask (a tool's turn) and a fully masked row."""
    g = torch.Generator().manual_seed(seed)
    samples = {}
    for number in range(count):
        length = int(torch.randint(4, 41, (1,), generator=g))
        prompt = int(torch.randint(1, length - 1, (1,), generator=g))
        mask = torch.arange(length) >= prompt
        if number == 1:
            mask = torch.arange(length) == length - 1
        if number == 2:
            mask[:] = False
        if number == 3:
            mask &= torch.rand(length, generator=g) > 0.4
            mask[-1] = True
        samples[number] = Sample(
            tokens=torch.randint(0, VOCAB, (length,), generator=g),
            loss_mask=mask,
            columns={
                "advantages": torch.full((length,), float(torch.randn((), generator=g))),
                "rollout_logprobs": -4.5 + 0.3 * torch.randn(length, generator=g),
                "token_versions": 5 - (number + torch.arange(length, dtype=torch.int32)) % 3,
            },
        )
    return samples
