"""Columns that a recipe asked for, as estimators and losses find them."""

from collections.abc import Mapping

from torch import Tensor


def column(columns: Mapping[str, Tensor], name: str, reader: str) -> Tensor:
    """The column of that name. Raises ValueError saying how to come by it where it is not there."""
    if name not in columns:
        there = ", ".join(sorted(columns)) or "none"
        raise ValueError(
            f"{reader} reads the column {name!r}, which is not there (there are: {there}); name it in also_consumes, "
            "and let some role write it"
        )
    return columns[name]
