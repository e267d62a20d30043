"""Candidates of many requests at once are those of each alone, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from meshy.inference.embedded.scoring import append_candidates, top
from tests.inference.conftest import request
from tests.inference.models import VOCAB


def rows_of(scored):
    return [(row.logprobs.tolist(), row.ids.tolist()) for row in scored]


@pytest.mark.parametrize("vocab", [12, 272, 5000])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_ties_are_broken_alike_in_batches_of_any_size(vocab: int, count: int):
    torch.manual_seed(vocab)
    logprobs = torch.randint(0, 5, (61, vocab)).float()  # many equal ones
    together = rows_of(top(logprobs, count))
    assert together == rows_of(scored for row in logprobs for scored in top(row[None], count))
    assert together[::3] == rows_of(top(logprobs[::3], count))
    values = logprobs.sort(descending=True)[0][:, :count].tolist()
    assert [row[0] for row in together] == values and all(len(set(ids)) == count for _, ids in together)


def test_no_more_candidates_than_tokens():
    (scored,) = top(torch.log_softmax(torch.randn(1, 7), dim=-1), 9)
    assert sorted(scored.ids.tolist()) == list(range(7))


def test_each_request_gets_as_many_as_it_asked_for():
    counts = [2, 0, 3, 2, 0, 5]
    requests = [request(str(row), [1], 1, logprobs={"top": count}) for row, count in enumerate(counts)]
    logprobs = torch.randn(len(counts), 40).log_softmax(dim=-1)
    append_candidates(requests, logprobs)
    for row, (one, count) in enumerate(zip(requests, counts, strict=True)):
        assert rows_of(one.output_top) == (rows_of(top(logprobs[row][None], count)) if count else [])


def test_bits_of_candidates_do_not_depend_on_the_batch(folder, new_bench):
    def probes():
        sizes = [(1, 8), (5, 30), (17, 40), (100, 60), (3, 150)]
        return [
            request(f"probe{i}", [(i + 3 * j) % VOCAB for j in range(n)], count, seed=i, logprobs={"top": 2 + i % 3})
            for i, (n, count) in enumerate(sizes)
        ]

    rng = random.Random(3)
    others = [
        request(f"other{i}", [rng.randrange(VOCAB)] * rng.randrange(1, 60), rng.randrange(1, 90), seed=i, logprobs=how)
        for i, how in enumerate([{}, {"top": 3}, {"top": 4}] * 6)
    ]
    alone = new_bench(folder, slots=1).run(probes())
    crowd = probes()
    mixed = crowd + others
    rng.shuffle(mixed)
    new_bench(folder, slots=13).run(mixed)
    for one, other in zip(alone, crowd, strict=True):
        assert one.output == other.output and len(one.output_top) == len(one.output)
        assert rows_of(one.output_top) == rows_of(other.output_top)
