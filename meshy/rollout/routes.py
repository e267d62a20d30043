"""Which of several roles a group's rows are for: functions from an example to the name of a route, or to None where it
has none. A recipe names one by import path. A row of route r has the column `route.r`, which the role waits for."""

from __future__ import annotations

from meshy.columns import Column, route_column
from meshy.data.task import Example


def domain(example: Example) -> str | None:
    """What the data say: `info["domain"]`."""
    return example.info.get("domain")


def column_of(route: str) -> Column:
    return Column(route_column(route), "bool", doc="true where the row is of this route; the other rows have none")
