"""A seeded request gives the same tokens and bits whatever it is batched with."""

from __future__ import annotations

import random

import pytest
import torch

from tests.inference.conftest import request
from tests.inference.models import CONTEXT, SHAPES, VOCAB

KINDS = ({}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0})


def requests_of(seed: int):
    """The requests under test: prompts and lengths of all sizes, crossing the blocks of the attention."""
    rng = random.Random(seed)
    sizes = [(1, 8), (5, 30), (16, 20), (17, 40), (40, 100), (100, 60), (127, 6), (130, 90), (3, 200)]
    return [
        request(f"probe{i}", [rng.randrange(VOCAB) for _ in range(n)], count, seed=100 + i, **KINDS[i % 3])
        for i, (n, count) in enumerate(sizes)
    ]


def neighbours(seed: int, count: int):
    rng = random.Random(seed)
    for i in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 90))]
        yield request(f"other{seed}.{i}", prompt, rng.randrange(1, CONTEXT - 90), seed=rng.randrange(10**9))


def outcome(done):
    return [(one.output, one.logprobs) for one in done]


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_do_not_depend_on_the_batch(shape, model_folders, new_bench):
    torch.set_num_threads(1)
    alone = new_bench(model_folders[shape], slots=1)
    expected = outcome(alone.run(requests_of(0)))
    crowded = new_bench(model_folders[shape], slots=13)
    for seed in (1, 2):
        probes, others = requests_of(0), list(neighbours(seed, 25))
        mixed = [*others[:12], *probes, *others[12:]]
        random.Random(seed).shuffle(mixed)
        for one in mixed:
            one.rid += f"/{seed}"
        crowded.run(mixed)
        assert outcome(probes) == expected


def test_equal_seeds_give_equal_and_other_seeds_other_tokens(shared_bench):
    a, b, c = shared_bench.run(
        [request(name, [9, 9, 9], 40, seed=seed) for name, seed in (("a", 4), ("b", 4), ("c", 5))]
    )
    assert a.output == b.output and a.logprobs == b.logprobs
    assert a.output != c.output


def test_a_request_continued_from_its_prefix_writes_the_same_tokens(shared_bench):
    (whole,) = shared_bench.run([request("whole", [8, 2, 5], 60, seed=11)])
    cut = 23
    (rest,) = shared_bench.run([request("rest", [8, 2, 5, *whole.output[:cut]], 60 - cut, seed=11)])
    assert rest.output == whole.output[cut:]
