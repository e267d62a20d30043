"""JSON lines that survive a crash of their writer and can be followed while they grow."""

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

log = logging.getLogger(__name__)


class JsonlWriter:
    """Appends JSON lines, each on disk for readers as soon as `write` returns.

    A half line that a crash left at the end is removed first. NaN and infinities are written as null, with one
    warning for each name, for JSON has no such numbers and readers in other languages refuse them.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _cut_half_line(self.path)
        self._file = self.path.open("ab", buffering=0)
        self._warned: set[str] = set()

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one line. Scalars of numpy and torch become numbers, arrays and tensors lists."""
        try:
            line = json.dumps(dict(row), allow_nan=False, default=plain)
        except ValueError:
            values = json.loads(json.dumps(dict(row), default=plain))
            self._warn(values)
            line = json.dumps(finite(values))
        self._file.write((line + "\n").encode())

    def _warn(self, values: Any) -> None:
        for name in non_finite(values):
            if name not in self._warned:
                self._warned.add(name)
                log.warning("%s: %s is not a finite number; written as null (said once)", self.path.name, name)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TailReader:
    """Follows a file of JSON lines: each `read` gives the rows that came since the last one.

    The file may not exist yet; a line without its end yet is kept for later; a file that shrank is read anew.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._offset = 0
        self._line = 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    self._offset, self._line = 0, 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        rows = []
        for text in whole.splitlines():
            self._line += 1
            try:
                rows.append(json.loads(text))
            except ValueError as error:
                log.warning("%s line %d is not JSON, skipped: %s", self.path, self._line, error)
        return rows


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """All whole lines of the file, [] when it does not exist; a half last line (a crash) is left out."""
    return TailReader(path).read()


def finite(value: Any) -> Any:
    """The same value with every NaN and infinity in it replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def non_finite(value: Any, name: str = "") -> list[str]:
    """Dotted names of the NaN and infinite numbers in a JSON value; list items share the name of their list."""
    if isinstance(value, float):
        return [] if math.isfinite(value) else [name]
    if isinstance(value, Mapping):
        return [
            found for key, item in value.items() for found in non_finite(item, f"{name}.{key}" if name else str(key))
        ]
    if isinstance(value, list):
        return sorted({found for item in value for found in non_finite(item, name)})
    return []


def plain(value: Any) -> Any:
    """For `json.dumps(default=...)`: tensors, arrays and their scalars, paths and sets as JSON values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r:.80}")


def _cut_half_line(path: Path) -> None:
    """Shortens the file to its last newline."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        while position > 0:
            step = min(65536, position)
            file.seek(position - step)
            newline = file.read(step).rfind(b"\n")
            if newline >= 0:
                position = position - step + newline + 1
                break
            position -= step
        if position < end:
            file.truncate(position)
