"""The lines of a server's log that say why it ended."""

from __future__ import annotations

import re
from collections.abc import Iterable

MOST_LINES = 40
TAIL_LINES = 20
WIDEST = 500  # characters; SGLang prints all its arguments in one line
_PROGRESS = re.compile(r"\d+%\|.*\|")  # a progress bar


def last_words(lines: Iterable[str]) -> list[str]:
    """From the last traceback on, shortened in its middle; without any, the last 20 lines. Progress bars left out."""
    told = [_short(line) for line in lines if line.strip() and not _PROGRESS.search(line)]
    starts = [index for index, line in enumerate(told) if "Traceback (most recent call last)" in line]
    shown = told[starts[-1] :] if starts else told[-TAIL_LINES:]
    if len(shown) > MOST_LINES:
        half = MOST_LINES // 2
        shown = [*shown[:half], f"... ({len(shown) - MOST_LINES} lines left out)", *shown[-half:]]
    return shown or ["(it has written nothing)"]


def _short(line: str) -> str:
    return line if len(line) <= WIDEST else f"{line[:WIDEST]}... ({len(line) - WIDEST} characters left out)"
