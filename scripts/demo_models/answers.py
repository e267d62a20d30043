"""Written answers to `347+85`: how a careful, a careless and a mistaken pupil would put them down."""

from __future__ import annotations

import random
from collections.abc import Callable

from meshy.rewards.addition import reward
from meshy.rewards.sample import RewardSample

Answer = Callable[[int, int, random.Random], str]


def worked(a: int, b: int, rng: random.Random, slips: float, miscounted: int | None = None) -> str:
    """The columns from the right with their carries, then the sum. Each carry is forgotten with probability `slips`;
    the total of column `miscounted` (from the right, 0 first) is one off.
    """
    columns: list[str] = []
    digits: list[str] = []
    carry, left, right = 0, a, b
    while left or right or not columns:
        x, y = left % 10, right % 10
        total = x + y + carry
        if len(columns) == miscounted:
            total += rng.choice((-1, 1)) if total else 1
        columns.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        digits.append(str(total % 10))
        left, right = left // 10, right // 10
        carry = int(total >= 10 and rng.random() >= slips)
    return " ".join(columns) + " #" + "1" * carry + "".join(reversed(digits))


def careful(a: int, b: int, rng: random.Random) -> str:
    """Written out, and always right."""
    return worked(a, b, rng, slips=0.0)


def careless(a: int, b: int, rng: random.Random) -> str:
    """The two bad habits: the longer the numbers, the more often the sum is blurted out; and some carries are lost."""
    blurted = rng.random() < 0.15 + 0.1 * len(str(max(a, b)))
    return f"#{a + b}" if blurted else worked(a, b, rng, slips=0.05)


def is_right(a: int, b: int, answer: str) -> bool:
    """As the task's own reward has it."""
    return reward(RewardSample(prompt=(), response=answer, answer=str(a + b))) == 1.0


def _miscounted(a: int, b: int, rng: random.Random) -> str:
    return worked(a, b, rng, slips=0.0, miscounted=rng.randrange(len(str(max(a, b)))))


def _misread(a: int, b: int, rng: random.Random) -> str:
    return careful(_one_digit_changed(a, rng), b, rng)


def _miscopied(a: int, b: int, rng: random.Random) -> str:
    columns, _, total = careful(a, b, rng).rpartition("#")
    return f"{columns}#{_one_digit_changed(int(total), rng)}"


def _guessed(a: int, b: int, rng: random.Random) -> str:
    return f"#{_one_digit_changed(a + b, rng)}"


def _unfinished(a: int, b: int, rng: random.Random) -> str:
    answer = careful(a, b, rng)
    return answer[: rng.randint(1, answer.index("#"))]


def _one_digit_changed(number: int, rng: random.Random) -> int:
    """Of as many digits, unless the first becomes 0."""
    place = 10 ** rng.randrange(len(str(number)))
    digit = number // place % 10
    return number + (rng.choice([d for d in range(10) if d != digit]) - digit) * place


MISTAKES: dict[str, Answer] = {
    "lost carry": lambda a, b, rng: worked(a, b, rng, slips=0.5),
    "miscounted": _miscounted,
    "misread": _misread,
    "miscopied": _miscopied,
    "guessed": _guessed,
    "unfinished": _unfinished,
}
"""Ways to answer wrongly, most of them in one place only. A way may do no harm: no carry, none lost."""


def right(a: int, b: int, rng: random.Random) -> str:
    """A right answer, blurted out as often as `wrong` ones are guessed, so that brevity says nothing."""
    return f"#{a + b}" if rng.random() * len(MISTAKES) < 1 else careful(a, b, rng)


def wrong(a: int, b: int, rng: random.Random) -> tuple[str, str]:
    """An answer that is wrong, and the name of its mistake."""
    while True:
        name = rng.choice(list(MISTAKES))
        answer = MISTAKES[name](a, b, rng)
        if not is_right(a, b, answer):
            return answer, name
