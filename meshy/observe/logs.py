"""Logs of service processes: one format for all, and the last words of a process that died."""

import faulthandler
import logging
import os
import re
import sys
import time
from pathlib import Path

LEVEL_VARIABLE = "MESHY_LOG_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
TALKATIVE = ("httpx", "httpcore", "uvicorn.access", "matplotlib", "asyncio", "urllib3", "filelock", "fsspec")

TAIL_LINES = 20
LONGEST_MESSAGE = 60
TAIL_BYTES = 1 << 20

_HEADER = re.compile(r"^(?P<prefix>.*?)(?:Exception Group )?Traceback \(most recent call last\):\s*$")
_RECORD = re.compile(
    r"^\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d"  # ours
    r"|^\[?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b"  # uvicorn's
    r"|^(?:\[rank\d+\]:)?\[?[IWEF]\d{4} \d\d:"  # PyTorch's
)
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_FATAL = re.compile(r"^Fatal Python error: ")


class _Formatter(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO    trainer.0 meshy.training.loop: message`, in local time."""

    def __init__(self, service: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03d %(levelname)-7s {service} %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"
        )


def setup_logging(service: str, level: str | None = None) -> None:
    """Sends all logging, warnings and fatal signals of this process to stderr, which its parent writes to a file.

    The level is `level`, or the environment's MESHY_LOG_LEVEL, or INFO. Raises ValueError when it is none of LEVELS.
    """
    chosen = (level or os.environ.get(LEVEL_VARIABLE) or "INFO").upper()
    if chosen not in LEVELS:
        raise ValueError(f"{LEVEL_VARIABLE}={chosen!r} is not a log level; choose one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(chosen)
    if chosen != "DEBUG":
        for name in TALKATIVE:
            logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    faulthandler.enable(sys.stderr)


def last_traceback(path: str | Path, since: int = 0) -> str | None:
    """The last traceback in a log from byte `since` on, with those it is chained to; without any, the last 20 lines.

    What was logged after the traceback is shown shortened below it, for the process may have died of something else.
    A fatal signal that faulthandler reported counts as a traceback. None when the log is missing or empty.
    """
    lines = _tail(Path(path), since)
    if not lines:
        return None
    start = _last_start(lines)
    if start is None:
        return "\n".join(lines[-TAIL_LINES:])
    end = _end(lines, start)
    shown = lines[start:end]
    later = [line for line in lines[end:] if line.strip()]
    if later:
        count = f"{len(later)} more line{'s' if len(later) > 1 else ''}"
        shown += ["", f"(the log goes on for {count}; the end of it:)", *later[-5:]]
    return "\n".join(shown)


def _tail(path: Path, since: int) -> list[str]:
    """The lines of the log's last mebibyte, or from byte `since` on, trailing blank ones left out."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(since, size - TAIL_BYTES)
            file.seek(start)
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    lines = text.rstrip().splitlines()
    return lines[1:] if start > since else lines


def _last_start(lines: list[str]) -> int | None:
    """The first line of the last traceback, of the outermost one of a chain or group."""
    for index in range(len(lines) - 1, -1, -1):
        if _FATAL.match(lines[index]):
            return index
        if match := _HEADER.match(lines[index]):
            return _chain_start(lines, index, match["prefix"])
    return None


def _chain_start(lines: list[str], index: int, prefix: str) -> int:
    """Goes up from a traceback's header while it is chained to an earlier one or lies within an exception group."""
    if re.match(r"^\s+[|+]", lines[index]):  # within a group, whose outermost header starts with "  + "
        while index > 0 and not lines[index].startswith("  + Exception Group Traceback"):
            index -= 1
        prefix = ""
    above = index - 1
    while above >= 0 and not lines[above].removeprefix(prefix).strip(" |"):
        above -= 1
    if above < 0 or not lines[above].rstrip().endswith(_CHAINED):
        return index
    for earlier in range(above - 1, -1, -1):
        if match := _HEADER.match(lines[earlier]):
            return _chain_start(lines, earlier, match["prefix"])
    return index


def _end(lines: list[str], start: int) -> int:
    """One past the last line of what starts at `start`: its frames and the message, which may have many lines."""
    last_header = max((i for i in range(start, len(lines)) if _HEADER.match(lines[i])), default=start)
    match = _HEADER.match(lines[last_header])
    if match is None:  # a fatal signal: everything after it belongs to it
        return min(len(lines), start + LONGEST_MESSAGE)
    prefix = match["prefix"]
    index = last_header + 1
    while index < len(lines) and lines[index].removeprefix(prefix).startswith((" ", "\t")):
        index += 1
    limit = min(len(lines), index + LONGEST_MESSAGE)
    while index < limit and lines[index].startswith(prefix.rstrip()) and not _RECORD.match(lines[index]):
        index += 1
    while index > last_header and not lines[index - 1].strip():
        index -= 1
    return index


def stamp(seconds: float) -> str:
    """Local wall-clock time of a unix time, as the logs write it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
