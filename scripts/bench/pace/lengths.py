"""How long each response is: log-normal, and known to whoever knows the seed of the sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

from meshy.rollout.group import sample_seed

SEEDS = 1 << 31  # as many as `sample_seed` tells apart


def response_length(seed: int, *, mean: float = 200.0, sigma: float = 1.0) -> int:
    """Tokens of the response to the request with this seed, in [0, 2^31): at least one, log-normal, of that mean."""
    normal = NormalDist().inv_cdf((seed + 0.5) / SEEDS)
    return max(1, round(math.exp(math.log(mean) - sigma**2 / 2 + sigma * normal)))


def lengths_of_run(run_seed: int, group_size: int, *, mean: float = 200.0, sigma: float = 1.0) -> Callable[[int], int]:
    """Tokens of sample i of a deterministic run with that seed: number i % group_size of position i // group_size."""

    def length(sample: int) -> int:
        return response_length(sample_seed(run_seed, *divmod(sample, group_size)), mean=mean, sigma=sigma)

    return length
