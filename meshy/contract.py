"""From what all roles of a run declare to one contract, and every reason why that does not hold. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshy.columns import Column, Consumer, Consumes, Contract, PartitionContract, Produces, ack_column, route_column
from meshy.importing import nearest


@dataclass(frozen=True)
class Declaration:
    """One group's share of the contract."""

    group: str
    replicas: int
    consumes: tuple[Consumes, ...]
    produces: tuple[Produces, ...]
    live_rows: Mapping[str, int] = field(default_factory=dict)


def derive_contract(declarations: Iterable[Declaration]) -> tuple[Contract, list[str]]:
    """Join what all groups declare. Returns the contract and every fault found in it (empty when it holds)."""
    declarations = tuple(declarations)
    faults: list[str] = []
    names = sorted(
        {p.partition for d in declarations for p in d.produces}
        | {c.partition for d in declarations for c in d.consumes}
    )
    partitions = {name: _derive_partition(name, declarations, faults) for name in names}
    capacity = {
        name: sum(declaration.live_rows.get(name, 0) for declaration in declarations) or DEFAULT_LIVE_ROWS
        for name in names
    }
    return Contract(partitions, capacity), faults


DEFAULT_LIVE_ROWS = 1024
"""Rows alive in a partition for which no role declares a bound."""


_Producers = dict[str, list[tuple[str, Produces]]]
"""Column -> the groups that write it, and how they declare it."""


def _derive_partition(name: str, declarations: tuple[Declaration, ...], faults: list[str]) -> PartitionContract:
    columns: dict[str, Column] = {}
    producers: _Producers = {}
    writers: dict[str, list[str]] = {}
    for declaration in declarations:
        for produces in declaration.produces:
            if produces.partition != name:
                continue
            for column in produces.columns:
                _add_producer(name, column, declaration.group, produces, columns, producers, faults)
                writers.setdefault(declaration.group, []).append(column.name)
    consumers = _consumers(name, declarations, columns, faults)
    _check_end(name, consumers, writers, faults)
    for declaration in declarations:
        _check_routes(name, declaration, columns, producers, faults)
    _check_readers(name, consumers, producers, faults)
    _check_circles(name, consumers, producers, faults)
    acks = [ack_column(consumer.name) for consumer in consumers.values() if not consumer.end]
    for consumer in consumers.values():
        if not consumer.end:
            columns[ack_column(consumer.name)] = Column(ack_column(consumer.name), "int64")
            writers.setdefault(consumer.group, []).append(ack_column(consumer.name))
    routed = _routed(consumers, producers)
    waiting = {}
    for c in consumers.values():
        waits = (*c.columns, *(acks if c.end else ()))
        only = {column: routed[column] for column in waits if column in routed and c.route not in routed[column]}
        waiting[c.name] = replace(c, columns=waits, routed=only)
    return PartitionContract(
        name, columns, waiting, {group: tuple(dict.fromkeys(names)) for group, names in writers.items()}
    )


def _add_producer(
    partition: str,
    column: Column,
    group: str,
    produces: Produces,
    columns: dict[str, Column],
    producers: _Producers,
    faults: list[str],
) -> None:
    known = columns.setdefault(column.name, column)
    others = producers.setdefault(column.name, [])
    if (known.dtype, known.kind) != (column.dtype, column.kind):
        faults.append(
            f"{partition}.{column.name} has two types: {known.type} from {others[0][0]!r} and {column.type} from "
            f"{group!r}; let both declare the same one"
        )
        return
    for other_group, other in others:
        if produces.shared and other.shared:
            continue
        if produces.route == other.route:
            faults.append(
                f"{partition}.{column.name} has two producers, {other_group!r} and {group!r}; drop one, or give each a "
                "route of its own"
            )
        elif produces.route is None or other.route is None:
            plain, routed, route = (
                (group, other_group, other.route) if produces.route is None else (other_group, group, produces.route)
            )
            faults.append(
                f"{partition}.{column.name} has two producers, {routed!r} in rows of route {route!r} and {plain!r} in "
                f"all rows; drop one, or give {plain!r} a route of its own"
            )
    others.append((group, produces))


def _consumers(
    partition: str, declarations: tuple[Declaration, ...], columns: Mapping[str, Column], faults: list[str]
) -> dict[str, Consumer]:
    consumers: dict[str, Consumer] = {}
    for declaration in declarations:
        for consumes in declaration.consumes:
            if consumes.partition != partition:
                continue
            base = consumes.consumer or declaration.group
            _check_columns(partition, base, consumes, columns, faults)
            names = [f"{base}.{i}" for i in range(declaration.replicas)] if consumes.per_replica else [base]
            route = None if consumes.route is None else route_column(consumes.route)
            for name in names:
                if name in consumers:
                    faults.append(
                        f"partition {partition!r} has two consumers called {name!r} (groups "
                        f"{consumers[name].group!r} and {declaration.group!r}); each row would reach only one of "
                        "them: give one another `consumer` name"
                    )
                consumers[name] = Consumer(name, declaration.group, consumes.names, consumes.end, route)
    return consumers


def _check_columns(
    partition: str, consumer: str, consumes: Consumes, columns: Mapping[str, Column], faults: list[str]
) -> None:
    for wanted in consumes.columns:
        name = wanted if isinstance(wanted, str) else wanted.name
        produced = columns.get(name)
        if produced is None:
            faults.append(
                f"{consumer!r} consumes {partition}.{name}, which nothing produces{nearest(name, columns)}; it would "
                "wait for ever: add the role that writes it, or drop the column"
            )
        elif not isinstance(wanted, str) and (wanted.dtype, wanted.kind) != (produced.dtype, produced.kind):
            faults.append(
                f"{partition}.{name} has two types: {consumer!r} expects {wanted.type}, but it is produced as "
                f"{produced.type}"
            )


def _check_end(
    partition: str, consumers: Mapping[str, Consumer], writers: Mapping[str, Sequence[str]], faults: list[str]
) -> None:
    ends = [consumer for consumer in consumers.values() if consumer.end]
    if not ends:
        who = ", ".join(sorted(writers)) or "nobody"
        faults.append(
            f"partition {partition!r} (written by {who}) is cleared by nobody: its rows would pile up; "
            "let one consumer declare it with end=True"
        )
    elif len(ends) > 1:
        faults.append(
            f"partition {partition!r} has {len(ends)} end consumers ({', '.join(sorted(c.name for c in ends))}); "
            "exactly one may clear its rows, the others acknowledge (end=False)"
        )
    faults += [
        f"{end.name!r} clears partition {partition!r}, but only rows with {end.route}: the others would pile up; let "
        "it read the rows of all routes"
        for end in ends
        if end.route is not None
    ]


def _check_routes(
    partition: str,
    declaration: Declaration,
    columns: Mapping[str, Column],
    producers: _Producers,
    faults: list[str],
) -> None:
    group = declaration.group
    routes = {c.route for c in declaration.consumes if c.partition == partition}
    for route in sorted(route for route in routes if route is not None):
        column = route_column(route)
        if column not in columns:
            faults.append(
                f"{group!r} reads rows of route {route!r} in {partition!r}, but nothing produces {column}"
                f"{nearest(column, columns)}; it would wait for ever: let the role that creates the rows write it, or "
                "drop the route"
            )
        faults += [
            f"{partition}.{column} is written by {writer!r}, which creates no rows there: others could take a row "
            "before it is known to be of this route; let the role that creates the rows write it"
            for writer, _ in producers.get(column, ())
            if not _creates(writer, producers)
        ]
    for produces in declaration.produces:
        if produces.partition != partition or produces.shared:
            continue
        names = ", ".join(f"{partition}.{column.name}" for column in produces.columns)
        if produces.route is not None and produces.route not in routes:
            faults.append(
                f"{group!r} produces {names} for rows of route {produces.route!r}, which it does not read; let its "
                f"Consumes of {partition!r} name route={produces.route!r} too, or drop the route"
            )
        elif produces.route is None and routes and None not in routes and not _creates(group, producers):
            faults.append(
                f"{group!r} produces {names} for all rows, but reads only those of route "
                f"{', '.join(map(repr, sorted(map(str, routes))))}; name the route in its Produces too"
            )


def _check_readers(partition: str, consumers: Mapping[str, Consumer], producers: _Producers, faults: list[str]) -> None:
    """What a role adds to the rows of others must be waited for by somebody."""
    read = {column for consumer in consumers.values() for column in consumer.columns}
    for column, sources in producers.items():
        groups = [group for group, produces in sources if not produces.shared and not _creates(group, producers)]
        if groups and column not in read:
            faults.append(
                f"{partition}.{column}, which {' and '.join(map(repr, groups))} would add to the rows of others, is "
                "read by nobody: name it in the trainer's also_consumes, or drop the role"
            )


def _check_circles(partition: str, consumers: Mapping[str, Consumer], producers: _Producers, faults: list[str]) -> None:
    """Roles that wait for one another's columns, in rows of no route or of one, would wait for ever."""
    routes = sorted({p.route for sources in producers.values() for _, p in sources if p.route is not None})
    for route in (None, *routes):
        if stuck := _stuck(_waits(route, consumers, producers)):
            faults.append(_told_circle(partition, stuck))
            return


_Wanted = tuple[str, frozenset[str]]
"""A column, and the groups that write it into rows that are there."""


def _waits(
    route: str | None, consumers: Mapping[str, Consumer], producers: _Producers
) -> dict[str, frozenset[_Wanted]]:
    """Group -> what it waits for in rows of the route before it sees one; the least of its readers."""
    own = None if route is None else route_column(route)
    waits: dict[str, frozenset[_Wanted]] = {}
    for consumer in consumers.values():
        if consumer.route not in (None, own):
            continue
        wanted = set()
        for column in consumer.columns:
            sources = [s for s in producers.get(column, ()) if s[1].route in (None, route) and not s[1].shared]
            if sources and not any(_creates(group, producers) for group, _ in sources):
                wanted.add((column, frozenset(group for group, _ in sources)))
        if consumer.group not in waits or len(wanted) < len(waits[consumer.group]):
            waits[consumer.group] = frozenset(wanted)
    return waits


def _stuck(waits: Mapping[str, Iterable[_Wanted]]) -> dict[str, set[_Wanted]]:
    """The groups that never see a row, and what they never get."""
    stuck = {group: set(wanted) for group, wanted in waits.items()}
    while True:
        held = {group: {w for w in wanted if stuck.keys() & w[1]} for group, wanted in stuck.items()}
        held = {group: wanted for group, wanted in held.items() if wanted}
        if held.keys() == stuck.keys():
            return held
        stuck = held


def _told_circle(partition: str, stuck: Mapping[str, set[_Wanted]]) -> str:
    """One circle among those that are stuck; others may only wait behind it."""
    group, steps = min(stuck), {}
    while group not in steps:
        column, writers = min(stuck[group], key=lambda wanted: wanted[0])
        steps[group] = (column, min(stuck.keys() & writers))
        group = steps[group][1]
    circle = list(steps)[list(steps).index(group) :]
    told = ", and ".join(f"{g!r} waits for {partition}.{steps[g][0]} of {steps[g][1]!r}" for g in circle)
    return f"{told}: none of these ever comes; drop one of the columns"


def _creates(group: str, producers: _Producers) -> bool:
    """Whether a group creates rows of the partition."""
    return any(writer == group and produces.creates for sources in producers.values() for writer, produces in sources)


def _routed(consumers: Mapping[str, Consumer], producers: _Producers) -> dict[str, tuple[str, ...]]:
    """Columns, acknowledgements included, that only rows of some routes will have -> the columns of these routes."""
    routed: dict[str, tuple[str, ...]] = {
        ack_column(c.name): (c.route,) for c in consumers.values() if c.route is not None
    }
    for column, sources in producers.items():
        routes = [produces.route for _, produces in sources if produces.route is not None]
        if len(routes) == len(sources):
            routed[column] = tuple(sorted(map(route_column, routes)))
    return routed
