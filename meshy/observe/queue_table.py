"""The queue as a person sees it: rows ready by partition and column, and who waits for which column."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

QueueTable = Mapping[str, Mapping[str, Any]]
"""What the queue's admin endpoint serves under `/table`:
`{partition: {rows, capacity, columns: {column: rows ready}, consumers: {consumer: {ready, waiting, missing, taken}}}}`,
where `missing` tells for each column how many of the consumer's waiting rows lack it."""


def depth(table: QueueTable, partition: str = "train") -> str | None:
    """The queue in a few words, for a progress line: `24 rows, 8 wait for reward`. None without that partition."""
    if partition not in table:
        return None
    entry = table[partition]
    missing: dict[str, int] = {}
    for consumer in entry.get("consumers", {}).values():
        for column, rows in consumer.get("missing", {}).items():
            missing[column] = max(rows, missing.get(column, 0))
    waits = [f"{rows} wait for {column}" for column, rows in sorted(missing.items(), key=lambda item: -item[1])[:1]]
    return ", ".join([f"{entry['rows']} rows", *waits])


def ready_by_count(columns: Mapping[str, int]) -> list[tuple[int, list[str]]]:
    """Columns grouped by the number of rows that have them, most rows first."""
    counts: dict[int, list[str]] = {}
    for column, rows in columns.items():
        counts.setdefault(rows, []).append(column)
    return sorted(counts.items(), reverse=True)


def partitions_table(table: QueueTable) -> "Table":
    """Partition x column: rows ready. Columns that equally many rows have share a line."""
    view = _table("partition", "rows", "ready", "columns")
    for name, entry in table.items():
        cells = [name, f"{entry['rows']} of {entry['capacity']}"]
        for rows, columns in ready_by_count(entry["columns"]) if entry["rows"] else [(0, ["-"])]:
            view.add_row(*cells, str(rows), ", ".join(columns))
            cells = ["", ""]
    return view


def consumers_table(table: QueueTable) -> "Table":
    """For each consumer: rows it may take, rows that still wait, and for which column."""
    view = _table("consumer", "partition", "ready", "waiting", "for")
    for name, entry in table.items():
        for consumer, rows in entry["consumers"].items():
            missing = _missing(rows["missing"].items())
            view.add_row(consumer, name, str(rows["ready"]), str(rows["waiting"]), missing)
    return view


def _missing(items: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{column} ({rows})" for column, rows in sorted(items, key=lambda item: -item[1])) or "-"


def _table(*headings: str) -> "Table":
    from rich import box
    from rich.table import Table

    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in headings:
        right = heading in ("ready", "waiting", "rows")
        view.add_column(heading, justify="right" if right else "left", overflow="fold")
    return view
