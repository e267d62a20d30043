r"""Mathematical answers: find the final answer in a response, and compare it with the gold one. Torch-free.

The last `\boxed{...}` or `#### ...` is the final answer, wherever it stands; without either, what follows the last
"answer is", else the last number. Numbers compare by value, other answers as normalised text, then symbolically.

A symbolic comparison can run for ever on hostile input; the reward pool's deadline ends it. No alarm signals are used.
"""

from __future__ import annotations

import re
from fractions import Fraction

from meshy.rewards.sample import RewardSample

_NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"  # starts and ends with a digit; commas only between thousands
_WHOLE_NUMBER = re.compile(rf"\+?({_NUMBER}|-?\.\d+)")
_NUMBER_TOKEN = re.compile(rf"(?<![\w.,])(?:\\?\$\s*)?({_NUMBER})(?!\d)")
_SIMPLE_FRACTION = re.compile(r"(-?)\\frac\{(\d+)\}\{(\d+)\}|(-?)(\d+)/(\d+)")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_ANSWER_IS = re.compile(r"answer(?:\s+is|\s*:)\s*:?\s*([^\n]+)", re.IGNORECASE)
_UNIT = re.compile(r"(?:\\ |\\[,;:!]|~|\s)*\\(?:text|mbox|mathrm|textbf)\s*\{[^{}]*\}\s*$")


def reward(sample: RewardSample) -> float:
    """1.0 if the response's final answer equals the gold one, else 0.0."""
    return float(grade(sample.response, str(sample.answer)))


def grade(response: str, gold: str) -> bool:
    """Whether the response's final answer equals `gold`. Never raises on odd text; an empty gold matches nothing."""
    found = final_answer(response)
    if found is None or not gold.strip():
        return False
    answer, in_prose = found
    value = number(gold)
    if in_prose and value is not None:
        token = _NUMBER_TOKEN.search(answer)
        return number(answer) == value or (token is not None and number(token[1]) == value)
    return equal(answer, gold)


def final_answer(response: str) -> tuple[str, bool] | None:
    """The final answer's text, and whether words may surround it (a box holds the answer alone); None if absent."""
    boxes = _boxes(response)
    hashes = list(_HASHES.finditer(response))
    if boxes and (not hashes or boxes[-1][0] > hashes[-1].start()):
        return boxes[-1][1], False
    if hashes:
        return hashes[-1][1], True
    if _BOX.search(response):
        return None  # a box that was never closed
    stated = _ANSWER_IS.findall(response)
    if stated:
        return stated[-1], True
    numbers = _NUMBER_TOKEN.findall(response)
    return (numbers[-1], True) if numbers else None


def equal(answer: str, gold: str) -> bool:
    """Whether two answers are the same number, the same normalised text, or symbolically equal."""
    left, right = number(answer), number(gold)
    if left is not None and right is not None:
        return left == right
    mine, theirs = normalise(answer), normalise(gold)
    if not mine or not theirs:
        return False
    return mine == theirs or (_is_formula(mine) and _is_formula(theirs) and _symbolically_equal(mine, theirs))


def number(text: str) -> Fraction | None:
    r"""The exact value of a text that is one number or fraction, with or without currency, percent, thousands, unit."""
    plain = normalise(text).replace("$", "").removesuffix("%").removesuffix("\\")
    found = _WHOLE_NUMBER.fullmatch(plain)
    if found:
        return Fraction(found[1].replace(",", ""))
    found = _SIMPLE_FRACTION.fullmatch(plain)
    if found:
        sign, above, below = found[1] or found[4] or "", found[2] or found[5], found[3] or found[6]
        return Fraction(int(sign + above), int(below)) if int(below) else None
    return None


def normalise(text: str) -> str:
    r"""Text without spacing, sizes, units, math delimiters, a final full stop, or LaTeX thousands separators."""
    text = text.strip().rstrip(".").strip()
    text = _UNIT.sub("", text)
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"(?<=\d)(?:\{,\}|\\,|\\!,|,\\!|\\ )(?=\d{3}(?!\d))", ",", text)
    text = re.sub(r"\\(?:left|right|displaystyle|[,;:! ])", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = text.removeprefix(r"\(").removesuffix(r"\)").removeprefix(r"\[").removesuffix(r"\]")
    if len(text) > 1 and text.startswith("$") and text.endswith("$"):
        text = text.strip("$")
    text = text.replace(r"\$", "$").replace(r"\%", "%")
    return re.sub(r"\s+", "", text)


def _boxes(response: str) -> list[tuple[int, str]]:
    """Start and content of every closed box, outermost ones in order; a box within a box counts as its content."""
    boxes, position = [], 0
    while found := _BOX.search(response, position):
        depth, end = 1, found.end()
        while end < len(response) and depth:
            depth += {"{": 1, "}": -1}.get(response[end], 0)
            end += 1
        position = found.end()
        if depth:
            continue
        content = response[found.end() : end - 1]
        inner = _boxes(content)
        boxes.append((found.start(), inner[-1][1] if inner else content))
        position = end
    return boxes


def _is_formula(text: str) -> bool:
    """Whether a symbolic comparison makes sense: words and single letters (choices) compare as text only."""
    return any(character.isdigit() for character in text) or "\\" in text


def _symbolically_equal(answer: str, gold: str) -> bool:
    import math_verify  # costs a second: only where it is needed

    # Timeouts of math_verify use SIGALRM, which works in a main thread only; the pool's deadline takes their place.
    parsed = [math_verify.parse(f"${text}$", parsing_timeout=None, raise_on_error=False) for text in (gold, answer)]
    if not all(parsed):
        return False
    return bool(math_verify.verify(*parsed, timeout_seconds=None, raise_on_error=False))
