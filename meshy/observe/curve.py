"""The reward curve: as a PNG and in the characters of a terminal."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.text import Text

Point = tuple[float, float]

AXIS_WIDTH = 7


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Reward by step, its smoothed form, and the held-out accuracy by weight version."""

    rewards: tuple[Point, ...]
    smoothed: tuple[Point, ...]
    evals: tuple[Point, ...]

    @classmethod
    def of(cls, steps: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]]) -> "Curve":
        """From the lines of metrics.jsonl and evals.jsonl; what is null is left out."""
        rewards = tuple((row["step"], row["reward_mean"]) for row in steps if row.get("reward_mean") is not None)
        smooth = smoothed([reward for _, reward in rewards])
        return cls(
            rewards=rewards,
            smoothed=tuple((step, value) for (step, _), value in zip(rewards, smooth, strict=True)),
            evals=tuple((row["weight_version"], row["accuracy"]) for row in evals if row.get("accuracy") is not None),
        )

    @property
    def one_scale(self) -> bool:
        """Whether rewards lie in 0..1 as accuracies do, so that both may share an axis."""
        return all(-0.001 <= reward <= 1.001 for _, reward in self.rewards)


def smoothed(values: Sequence[float]) -> list[float]:
    """Each value replaced by the mean of its neighbourhood, a tenth of the series wide and at least 5."""
    half = max(2, len(values) // 20)
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def write_png(curve: Curve, path: Path, title: str) -> None:
    """Draws the curve, 1200 x 675 pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward, accuracy" if curve.one_scale and curve.evals else "mean reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    if curve.rewards:
        axes.plot(*zip(*curve.rewards, strict=True), color="tab:blue", alpha=0.35, linewidth=1, label="reward")
        axes.plot(*zip(*curve.smoothed, strict=True), color="tab:blue", linewidth=2, label="reward, smoothed")
    right = axes if curve.one_scale else axes.twinx()
    if curve.evals:
        style: dict[str, Any] = {"color": "tab:orange", "linestyle": "--", "marker": "D", "linewidth": 1}
        right.plot(*zip(*curve.evals, strict=True), label="held-out accuracy", **style)
    if not curve.one_scale:
        right.set_ylabel("held-out accuracy")
        right.set_ylim(-0.02, 1.02)
    if curve.rewards or curve.evals:
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path)


def text_chart(curve: Curve, width: int = 72, height: int = 12, unicode: bool = True) -> list[Text]:
    """The curve in `height` lines of characters and two of axis and legend; [] when there is nothing to draw.

    Braille dots (2 x 4 to a character), or plain ASCII where the terminal has no unicode.
    """
    evals = curve.evals if curve.one_scale else ()
    everything = (*curve.rewards, *evals)
    if not everything:
        return []
    columns = max(10, width - AXIS_WIDTH - 1)
    low, high = _range([y for _, y in everything])
    left, right = min(x for x, _ in everything), max(x for x, _ in everything)
    fine = (2, 4) if unicode else (1, 1)

    def place(point: Point, dots: tuple[int, int]) -> tuple[int, int]:
        x = (point[0] - left) / (right - left) if right > left else 0.5
        y = (high - point[1]) / (high - low)
        return round(x * (columns * dots[0] - 1)), round(y * (height * dots[1] - 1))

    cells: dict[tuple[int, int], tuple[str, str]] = {}
    cells |= _cells([place(point, fine) for point in curve.rewards], unicode, ".", "bright_black")
    cells |= _cells(_joined([place(point, fine) for point in curve.smoothed]), unicode, "*", "bold blue")
    cells |= {place(point, (1, 1)): ("◆" if unicode else "o", "bold yellow") for point in evals}
    return _lines(cells, columns, height, (low, high), (left, right), bool(evals), unicode)


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return low - margin, high + margin


def _joined(points: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The dots of the line through `points`."""
    dots = list(points[:1])
    for (x0, y0), (x1, y1) in pairwise(points):
        count = max(abs(x1 - x0), abs(y1 - y0), 1)
        dots += [(round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count)) for i in range(1, count + 1)]
    return dots


# Braille cells number their dots 1 2 3 7 down the left column and 4 5 6 8 down the right one.
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def _cells(
    dots: Sequence[tuple[int, int]], unicode: bool, plain: str, style: str
) -> dict[tuple[int, int], tuple[str, str]]:
    """The character and its style for each cell that holds a dot."""
    if not unicode:
        return dict.fromkeys(dots, (plain, style))
    bits: dict[tuple[int, int], int] = {}
    for x, y in dots:
        bits[x // 2, y // 4] = bits.get((x // 2, y // 4), 0) | _BITS[x % 2][y % 4]
    return {cell: (chr(0x2800 + pattern), style) for cell, pattern in bits.items()}


def _lines(
    cells: Mapping[tuple[int, int], tuple[str, str]],
    columns: int,
    height: int,
    span: Point,
    reach: Point,
    evals: bool,
    unicode: bool,
) -> list[Text]:
    bar, corner, dash = ("│", "└", "─") if unicode else ("|", "+", "-")
    decimals = max(0, min(6, 2 - math.floor(math.log10(span[1] - span[0]))))
    lines = []
    for row in range(height):
        labelled = row in (0, height // 2, height - 1)
        value = span[1] - (span[1] - span[0]) * row / (height - 1)
        line = Text(f"{value:{AXIS_WIDTH - 1}.{decimals}f} " if labelled else " " * AXIS_WIDTH)
        line.append(bar)
        for column in range(columns):
            line.append(*cells.get((column, row), (" ", "")))
        lines.append(line)
    first, last = f"{reach[0]:g}", f"step {reach[1]:g}"
    lines.append(Text(" " * AXIS_WIDTH + corner + dash * columns))
    lines.append(Text(" " * (AXIS_WIDTH + 1) + first + last.rjust(columns - len(first))))
    legend = Text(" " * (AXIS_WIDTH + 1)).append("⠒⠒" if unicode else "**", "bold blue").append(" reward, smoothed   ")
    legend.append("⠂⠐" if unicode else "..", "bright_black").append(" each step   ")
    if evals:
        legend.append("◆" if unicode else "o", "bold yellow").append(" held-out accuracy")
    return [*lines, legend]
