"""The demo's task: adding two whole numbers. Prompts look like `347+85`; the answer comes after a `#`.

A worked response writes the columns out from the right, with their carries: `7+5=12 4+8+1=13 3+0+1=4 #432`.
"""

from __future__ import annotations

import random
import zlib

from meshy.data.task import Example, Task

EVALUATION_SEED = 20_240_607  # the evaluation set is the same for every run's seed
HELD_OUT_SHARE = 8  # one pair in eight is held out


def is_held_out(a: int, b: int) -> bool:
    """Whether a pair (in either order) is kept for evaluation: no trainer and no demonstration may use it."""
    low, high = sorted((a, b))
    return zlib.crc32(f"{low}+{high}".encode()) % HELD_OUT_SHARE == 0


def draw_pair(rng: random.Random, max_digits: int, *, held_out: bool) -> tuple[int, int]:
    """Two numbers; the longer has 1..max_digits digits (uniform), the shorter up to two fewer."""
    while True:
        digits = rng.randint(1, max_digits)
        shorter = rng.randint(max(1, digits - 2), digits)
        pair = [rng.randrange(10 ** (n - 1) if n > 1 else 0, 10**n) for n in (digits, shorter)]
        rng.shuffle(pair)
        if is_held_out(*pair) == held_out:
            return pair[0], pair[1]


def _examples(split: str, count: int, rng: random.Random, max_digits: int) -> tuple[Example, ...]:
    examples = []
    for index in range(count):
        a, b = draw_pair(rng, max_digits, held_out=split == "evaluation")
        message = {"role": "user", "content": f"{a}+{b}"}
        info = {"digits": len(str(max(a, b)))}
        examples.append(Example(id=f"{split}-{index}", messages=(message,), answer=str(a + b), info=info))
    return tuple(examples)


def addition(*, seed: int = 0, max_digits: int = 5, train_size: int = 8192, evaluation_size: int = 256) -> Task:
    """Addition of numbers with up to `max_digits` digits. `seed` draws the training prompts."""
    if max_digits < 1:
        raise ValueError(f"addition: max_digits is {max_digits}; it must be at least 1")
    return Task(
        name="addition",
        train=_examples("train", train_size, random.Random(seed), max_digits),
        evaluation=_examples("evaluation", evaluation_size, random.Random(EVALUATION_SEED), max_digits),
        reward="meshy.rewards.addition:reward",
    )
