"""Sampling equals its definition."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshy.inference.embedded.request import RequestError, SamplingParams
from meshy.inference.embedded.sampler import SamplingBatch, derive_seed, draw, invert, kept, uniform
from tests.inference.conftest import request

CPU = torch.device("cpu")


def draws(logits: list[float], count: int, **sampling) -> torch.Tensor:
    """Tokens drawn by `count` seeds from one distribution."""
    requests = [request(str(i), [0], 1, seed=i, **sampling) for i in range(count)]
    batch = SamplingBatch.of(requests, CPU)
    return draw(torch.tensor([logits] * count), batch, np.full(count, 7)).tokens


def definition(probs: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that pass, spelled out."""
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    nucleus, mass = set(), 0.0
    for token in order:
        nucleus.add(token)
        mass += probs[token]
        if mass >= top_p:
            break
    first = set(order[:top_k]) if top_k > 0 else set(order)
    return {token for token in first & nucleus if probs[token] >= min_p * max(probs)}


# Probabilities are multiples of 1/64, so that sums and borders are exact in float32.
exact_probs = st.lists(st.integers(1, 20), min_size=2, max_size=12).map(
    lambda parts: [*(part / 64 for part in parts), max(0, 64 - sum(parts)) / 64]
)


@settings(max_examples=200, deadline=None)
@given(exact_probs, st.integers(-1, 13).filter(bool), st.integers(1, 64), st.integers(0, 8))
def test_filters_keep_what_their_definition_keeps(probs, top_k, top_p, min_p):
    keep = kept(
        torch.tensor([probs]),
        torch.tensor([[top_k if top_k > 0 else 2**31]]),
        torch.tensor([[top_p / 64]]),
        torch.tensor([[min_p / 8]]),
    )
    assert set(keep[0].nonzero()[:, 0].tolist()) == definition(probs, top_k, top_p / 64, min_p / 8)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.3},
        {"temperature": 1.5, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_frequencies_follow_the_distribution(sampling):
    logits = [0.3, -1.0, 2.0, 1.9, 0.0, -3.0, 1.0, 0.5]
    probs = torch.softmax(torch.tensor(logits, dtype=torch.float64) / sampling.get("temperature", 1.0), 0).tolist()
    passing = definition(probs, sampling.get("top_k", -1), sampling.get("top_p", 1.0), sampling.get("min_p", 0.0))
    mass = sum(probs[token] for token in passing)
    count = 20_000
    seen = Counter(draws(logits, count, **sampling).tolist())
    assert set(seen) <= passing
    expected = {token: count * probs[token] / mass for token in passing}
    chi_square = sum((seen[token] - n) ** 2 / n for token, n in expected.items())
    # The seeds are fixed, so this either holds always or never; 30 is far beyond the 99.9 % point of 7 degrees (24.3).
    assert chi_square < 30


def test_greedy_is_the_argmax_beside_sampled_rows():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 5.0], [0.0, 0.0, 9.0]])
    rows = [
        request("a", [0], 1, temperature=0.0),
        request("b", [0], 1, top_k=1, temperature=0.7),
        request("c", [0], 1, temperature=0.0),
    ]
    drawn = draw(logits, SamplingBatch.of(rows, CPU), np.array([1, 1, 1]))
    assert drawn.tokens.tolist() == [1, 0, 2]
    expected = torch.log_softmax(logits / torch.tensor([[1.0], [0.7], [1.0]]), -1)
    torch.testing.assert_close(drawn.all_logprobs, expected)


def test_a_draw_depends_on_seed_and_position_only():
    seeds, positions = np.array([5, 5, 6, 5]), np.array([9, 10, 9, 9])
    numbers = uniform(seeds, positions)
    assert numbers[0] == numbers[3] == uniform(seeds[:1], positions[:1])[0]
    assert len(set(numbers.tolist())) == 3


def test_numbers_are_uniform_and_unrelated_along_both_axes():
    grid = uniform(np.repeat(np.arange(300), 300), np.tile(np.arange(300), 300)).reshape(300, 300)
    assert (grid >= 0).all() and (grid < 1).all()
    counts = np.histogram(grid, bins=100, range=(0, 1))[0]
    assert ((counts - 900) ** 2 / 900).sum() < 160  # 99 degrees of freedom: 99.9 % point 149
    for a, b in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / math.sqrt(a.size)


def test_samples_of_one_request_have_seeds_of_their_own():
    seeds = {derive_seed(seed, index) for seed in range(50) for index in range(50)}
    assert len(seeds) == 2500
    assert derive_seed(17, 0) == 17


def test_inversion_never_picks_a_token_of_weight_zero():
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).expand(4, 5)
    numbers = torch.tensor([0.0, 0.25 - 1e-12, 0.25, 1 - 2**-53], dtype=torch.float64)
    assert invert(weights, numbers).tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "temperature must be a non-negative finite number"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature|could not convert"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_token": 3}, "Unknown sampling parameter 'max_new_token'"),
        ({"regex": "a+"}, "does not support the sampling parameter 'regex'"),
        ({"frequency_penalty": 0.5}, "does not support the sampling parameter 'frequency_penalty'"),
    ],
)
def test_bad_parameters_are_refused(fields, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams.parse(fields)


def test_parameters_that_mean_off_are_accepted():
    parsed = SamplingParams.parse({"frequency_penalty": 0, "repetition_penalty": 1.0, "json_schema": None, "n": 3})
    assert parsed == SamplingParams()
    assert SamplingParams.parse({"stop": "a", "sampling_seed": 3}) == SamplingParams(stop=("a",), seed=3)
