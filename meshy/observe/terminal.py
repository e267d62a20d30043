"""Writing to a terminal, a pipe or a file that may go away: colours on terminals only, no error that ends a run."""

import io
import logging
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)

PIPE_WIDTH = 160


class SafeStream(io.TextIOBase):
    """A text stream that falls silent when its reader goes away (`| head`, a closed terminal), said once in the log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.gone = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return not self.gone and self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not self.gone:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
            except (OSError, ValueError) as error:
                self._let_go(error)
        return len(text)

    def flush(self) -> None:
        if not self.gone:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._let_go(error)

    def _let_go(self, error: Exception) -> None:
        """Points the descriptor at nothing, so that the interpreter's own flush at its exit does not fail either."""
        self.gone = True
        log.info("nobody reads the terminal output any more (%s); going on without it", error)
        try:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self._stream.fileno())
            os.close(nothing)
        except (OSError, ValueError) as failure:
            log.debug("the output stream has no descriptor to redirect: %s", failure)


def console(stream: TextIO | None = None) -> "Console":
    """A rich console on `stream` (stdout) that never raises for a reader that left, and colours terminals only."""
    from rich.console import Console

    stream = stream if stream is not None else sys.stdout
    terminal = stream.isatty()
    return Console(
        file=cast(TextIO, SafeStream(stream)),
        force_terminal=terminal,
        width=None if terminal else PIPE_WIDTH,
        highlight=False,
        emoji=False,
    )


def duration(seconds: float) -> str:
    """`8 s`, `1:05`, `2:03:09`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def short(number: float | None, digits: int = 3) -> str:
    """`0.724`, `41.2`, `8.2k`, `-` for None: about `digits` significant digits and no more."""
    if number is None:
        return "-"
    for limit, divisor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(number) >= limit:
            return f"{number / divisor:.{digits}g}{unit}"
    if number == int(number) and abs(number) < 1e4:
        return str(int(number))
    decimals = digits - len(str(int(abs(number)))) if abs(number) >= 1 else digits
    return f"{number:.{max(decimals, 0)}f}"


def tiny(number: float | None) -> str:
    """`7.2e-14`, `-` for None: for what is far below 1."""
    return "-" if number is None else f"{number:.1e}"


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of those that are not None; None when there are none."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None
