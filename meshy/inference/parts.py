"""Seconds of each part of a piece of work, for the log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Parts:
    """`with parts.of("load"): ...`; as text "load 1.204 s, cache 0.003 s", in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - began

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.seconds.items())
