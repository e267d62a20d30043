"""Reads tests/cases/golden_losses.json: float64 numbers, tolerance 1e-6."""

import json
from functools import cache
from pathlib import Path

import torch

from meshy.algorithms.interface import GlobalCounts

TOLERANCE = 1e-6
PATH = Path(__file__).parents[1] / "cases" / "golden_losses.json"


@cache
def _load() -> dict:
    return json.loads(PATH.read_text())["cases"]


def cases(algorithm: str) -> list[dict]:
    return _load()[algorithm]


def case(algorithm: str, name: str) -> dict:
    return next(c for c in cases(algorithm) if c["name"] == name)


def f64(values: list) -> torch.Tensor:
    def number(x):
        return [number(y) for y in x] if isinstance(x, list) else float(x)

    return torch.tensor(number(values), dtype=torch.float64)


def close(actual: torch.Tensor, expected: list | float) -> None:
    expected = expected if isinstance(expected, torch.Tensor) else torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=TOLERANCE)


def group_numbers(groups: list) -> torch.Tensor:
    order = {g: i for i, g in enumerate(dict.fromkeys(groups))}
    return torch.tensor([order[g] for g in groups], dtype=torch.long)


def flat(mask: list, *values: list) -> tuple[torch.Tensor, ...]:
    """(sequence, *values) of the tokens where `mask` holds."""
    valid = f64(mask).bool()
    sequence = torch.arange(valid.shape[0])[:, None].expand_as(valid)[valid]
    return (sequence, *(f64(v)[valid] for v in values))


def counts_of(mask: list) -> GlobalCounts:
    valid = f64(mask).bool()
    return GlobalCounts(tokens=int(valid.sum()), sequences=int(valid.any(1).sum()))
