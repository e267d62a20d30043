"""Columns by name, that say what to do about one that is missing."""

from __future__ import annotations

from typing import Any

from meshy.importing import nearest


class Named(dict[str, Any]):
    """What a loss or an estimator is given."""

    def __missing__(self, name: str) -> Any:
        raise LookupError(
            f"column {name!r} is read by the loss or the advantage, but the trainer does not wait for it"
            f"{nearest(name, self)}; name it in also_consumes, or another one in the options"
        )
