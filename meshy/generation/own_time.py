"""How long the code of a coroutine itself runs, without what it waits for."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class OwnTime(Generic[Result]):
    """`await OwnTime(coroutine)` gives its result; then `seconds` is the time between its start and end in which it,
    and what it called, did not wait."""

    def __init__(self, work: Coroutine[Any, Any, Result]) -> None:
        self._work = work
        self.seconds = 0.0

    def __await__(self) -> Generator[Any, Any, Result]:
        work = self._work
        thrown: BaseException | None = None
        while True:
            begun = time.perf_counter()
            try:
                waits_for = work.send(None) if thrown is None else work.throw(thrown)
            except StopIteration as end:
                return end.value
            finally:
                self.seconds += time.perf_counter() - begun
            thrown = None
            try:
                yield waits_for
            except BaseException as error:  # noqa: BLE001  (for the coroutine to handle)
                thrown = error
