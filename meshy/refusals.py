"""What a recipe is refused for, before anything is placed. Each fault says what is wrong, where, and what to change.

What can only be seen once groups lie on GPUs (too few of them, uneven spans, ports) stands in `topology.py`; what does
not fit together among columns, in `contract.py`. This module is pure.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from meshy.importing import ImportPathError, nearest, path_of
from meshy.recipe import FALLBACK, ColocationRing, Recipe, ServiceConfig, ServiceGroup, plain

MOST_REPLICAS = 65536
MOST_STORAGE_UNITS = 4096


def type_faults(recipe: Recipe) -> list[str]:
    """Every field of the recipe whose value is not of its declared type, by its full path."""
    faults = _type_faults("", recipe, skip=("groups", "rings"))
    if not isinstance(recipe.groups, tuple):
        return [*faults, f"groups: expected a tuple of ServiceGroup, got {recipe.groups!r}"]
    for index, group in enumerate(recipe.groups):
        if not isinstance(group, ServiceGroup):
            faults.append(f"groups[{index}]: expected ServiceGroup, got {group!r}")
            continue
        faults += _type_faults(f"{group.id}.", group, skip=("config",))
        if isinstance(group.config, ServiceConfig):
            faults += _type_faults(f"{group.id}.", group.config)
        else:
            faults.append(f"{group.id}.config: expected a ServiceConfig, got {group.config!r}")
    if not isinstance(recipe.rings, tuple):
        return [*faults, f"rings: expected a tuple of ColocationRing, got {recipe.rings!r}"]
    for index, ring in enumerate(recipe.rings):
        if isinstance(ring, ColocationRing):
            faults += _type_faults(f"rings[{index}].", ring)
        else:
            faults.append(f"rings[{index}]: expected ColocationRing, got {ring!r}")
    return faults


def at(group: ServiceGroup, fault: str) -> str:
    """A fault that a group's configuration has told, with the full path of the field that it begins with, if any."""
    field = re.match(r"(\w+)[\w.\[\]]*: ", fault)
    known = {f.name for owner in (group, group.config) for f in dataclasses.fields(owner)}
    return f"{group.id}.{fault}" if field and field[1] in known else f"{group.id}: {fault}"


def _type_faults(prefix: str, value: Any, skip: tuple[str, ...] = ()) -> list[str]:
    hints = typing.get_type_hints(type(value))
    return [
        fault
        for f in dataclasses.fields(value)
        if f.name not in skip
        for fault in _field_faults(f"{prefix}{f.name}", f, hints[f.name], getattr(value, f.name))
    ]


def _field_faults(path: str, f: dataclasses.Field[Any], hint: Any, value: Any) -> list[str]:
    from pydantic import TypeAdapter, ValidationError

    wrong = [f"{path}: expected {type_name(hint)}, got {type(value).__name__} {value!r}"]
    within = [one for one in (hint, *typing.get_args(hint)) if isinstance(one, type) and dataclasses.is_dataclass(one)]
    if _is_record(value):
        return _type_faults(f"{path}.", value) if isinstance(value, tuple(within)) else wrong
    if hint in within:
        return wrong
    if isinstance(value, tuple):
        members = [(index, one) for index, one in enumerate(value) if _is_record(one)]
        if faults := [fault for index, one in members for fault in _type_faults(f"{path}[{index}].", one)]:
            return faults
    if callable(value):
        try:
            path_of(value)
        except ImportPathError as error:
            return [f"{path}: {error}"]
    try:
        TypeAdapter(hint).validate_python(value, strict=True)
    except ValidationError:
        return wrong
    if not f.metadata.get("may_be_infinite") and (faults := list(_infinite(path, value))):
        return faults
    try:
        json.dumps(plain(value))
    except (TypeError, ValueError, ImportPathError) as error:  # of a value within one that may be of any type
        return [f"{path}: expected what can be written as JSON, got {value!r}: {error}"]
    return []


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _infinite(path: str, value: Any) -> Iterator[str]:
    """A fault for each number in a value that is none or infinite."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{path}: expected a finite number, got {value}"
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _infinite(f"{path}.{key}", one)
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            yield from _infinite(f"{path}[{index}]", one)


def type_name(hint: Any) -> str:
    """A type as people write it: `int`, `float | None`, `'a' | 'b'`."""
    if hint is type(None):
        return "none"
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return " | ".join(repr(a) for a in arguments)
    if typing.get_origin(hint) is Mapping:
        return 'a JSON object such as {"name": 1}'
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join(type_name(a) for a in arguments)
    return getattr(hint, "__name__", str(hint)) if not arguments else str(hint).replace("typing.", "")


def structure_faults(recipe: Recipe) -> list[str]:
    """What is wrong with the groups themselves: nothing can be placed while any of this holds."""
    faults: list[str] = []
    ids = [group.id for group in recipe.groups]
    own = {f.name for f in dataclasses.fields(Recipe)}
    for id in dict.fromkeys(ids):
        if ids.count(id) > 1:
            faults.append(f"group id {id!r} is used {ids.count(id)} times; give each group an id of its own")
        if id in own:
            faults.append(f"group id {id!r} is also a run-wide field of the recipe; choose another id")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", id):
            faults.append(f"group id {id!r}: use up to 64 letters, digits and '_', starting with a letter")
    if not recipe.groups:
        faults.append("groups: the recipe has no service group; nothing would run")
    for group in recipe.groups:
        faults += _group_faults(recipe, group, ids)
    return faults


def value_faults(recipe: Recipe) -> list[str]:
    """What is wrong with the run-wide settings, and what each role says of its own."""
    faults: list[str] = []
    for name, value, least in (("steps", recipe.steps, 1), ("context_length", recipe.context_length, 2)):
        if value < least:
            faults.append(f"{name}: expected at least {least}, got {value}")
    if not 0 <= recipe.seed < 2**63:
        faults.append(f"seed: expected 0 to 2**63 - 1, got {recipe.seed}")
    if not re.fullmatch(r"[\w.-]*", recipe.name):
        faults.append(f"name: expected letters, digits, '_', '-' and '.', for the run's folder, got {recipe.name!r}")
    if not 1 <= recipe.queue.storage_units <= MOST_STORAGE_UNITS:
        units = recipe.queue.storage_units
        faults.append(f"queue.storage_units: expected 1 to {MOST_STORAGE_UNITS}, got {units}")
    faults += _sampling_faults(recipe)
    for group in recipe.groups:
        faults += [at(group, fault) for fault in group.config.faults(recipe)]
        restarts = group.config.max_restarts
        if restarts < 0:
            faults.append(f"{group.id}.max_restarts: expected 0 or more, got {restarts}")
        elif restarts and not group.config.can_restart:
            faults.append(f"{group.id}.max_restarts: this role cannot begin in the middle of a run; set it to 0")
    return faults


def _sampling_faults(recipe: Recipe) -> list[str]:
    s = recipe.sampling
    checks = (
        (s.temperature > 0, "temperature", s.temperature, "more than 0 (evaluation is greedy by itself)"),
        (0 < s.top_p <= 1, "top_p", s.top_p, "a share in (0, 1]"),
        (s.top_k == -1 or s.top_k >= 1, "top_k", s.top_k, "-1 (off) or at least 1"),
        (0 <= s.min_p < 1, "min_p", s.min_p, "a share in [0, 1)"),
        (s.max_new_tokens >= 1, "max_new_tokens", s.max_new_tokens, "at least 1"),
        (
            s.max_new_tokens < recipe.context_length, "max_new_tokens", s.max_new_tokens,
            f"less than context_length ({recipe.context_length}), which holds the prompt too",
        ),
    )  # fmt: skip
    return [f"sampling.{name}: expected {expected}, got {value}" for fine, name, value, expected in checks if not fine]


def _group_faults(recipe: Recipe, group: ServiceGroup, ids: list[str]) -> list[str]:
    faults: list[str] = []
    if not 1 <= group.replicas <= MOST_REPLICAS:
        faults.append(f"{group.id}.replicas: expected 1 to {MOST_REPLICAS}, got {group.replicas}")
    if group.gpus_per_replica < 0:
        faults.append(f"{group.id}.gpus_per_replica: expected 0 or more, got {group.gpus_per_replica}")
    if not group.config.service:
        faults.append(
            f"{group.id}: {type(group.config).__name__} names no `service` class; set service = 'module:Class'"
        )
    if group.config.processes == "per_gpu" and group.gpus_per_replica == 0:
        faults.append(f"{group.id}.gpus_per_replica: this role runs one process a GPU and needs at least 1")
    named = [("wait_for", other) for other in group.wait_for]
    named += [] if group.colocate_with is None else [("colocate_with", group.colocate_with)]
    for field, other in named:
        if other not in ids:
            faults.append(f"{group.id}.{field}: there is no group {other!r} in the recipe{nearest(other, ids)}")
        elif other == group.id:
            faults.append(f"{group.id}.{field}: it names itself; drop that")
    return faults


def ring_faults(recipe: Recipe) -> list[str]:
    """Rings that do not hold together, and groups that share GPUs without one."""
    faults: list[str] = []
    groups = {group.id: group for group in recipe.groups}
    ring_of: dict[str, str] = {}
    for ring in recipe.rings:
        faults += _one_ring_faults(ring, groups)
        for member in dict.fromkeys(id for id, _ in ring.members):
            if member in ring_of:
                faults.append(
                    f"group {member!r} is in two rings, {ring_of[member]!r} and {ring.id!r}; a GPU has one token"
                )
            ring_of[member] = ring.id
    names = [ring.id for ring in recipe.rings]
    faults += [f"ring id {id!r} is used twice; give each ring its own" for id in set(names) if names.count(id) > 1]
    for group in recipe.groups:
        if group.colocate_with is None or group.colocate_with not in groups:
            continue
        if group.id not in ring_of:
            faults.append(
                f"{group.id!r} shares the GPUs of {group.colocate_with!r} but is in no ring; add a ColocationRing with "
                "both as members"
            )
        elif ring_of.get(group.colocate_with) != ring_of[group.id]:
            faults.append(f"{group.id!r} and {group.colocate_with!r} share GPUs but are not in the same ring")
    return faults


def _one_ring_faults(ring: ColocationRing, groups: dict[str, ServiceGroup]) -> list[str]:
    faults: list[str] = []
    ids = [id for id, _ in ring.members]
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", ring.id):
        faults.append(f"ring id {ring.id!r}: use up to 64 letters, digits and '_', starting with a letter")
    for id, how in ring.members:
        waits = sorted((_waited_for(id, groups) & set(ids)) - {id})
        if how == FALLBACK and waits:
            faults.append(
                f"ring {ring.id!r}: {id!r}, which holds the GPUs while nobody asks, waits for {waits[0]!r} of the same "
                "ring, itself or by others that it waits for; let that one wait for it instead"
            )
        if how != FALLBACK and id in groups and groups[id].config.serves_http:
            faults.append(
                f"ring {ring.id!r}: {id!r} answers requests at any time and asks for nothing itself, so nobody would "
                "give it the GPUs; make it the FALLBACK member, of which a ring has one, or give it GPUs of its own"
            )
    if len(set(ids)) < 2:
        faults.append(f"ring {ring.id!r} has {len(set(ids))} member; sharing takes at least two groups")
    faults += [f"ring {ring.id!r} names group {id!r} twice" for id in sorted(set(ids)) if ids.count(id) > 1]
    unknown = [id for id in ids if id not in groups]
    faults += [
        f"ring {ring.id!r} names group {id!r}, which is not in the recipe{nearest(id, groups)}" for id in unknown
    ]
    for id in ids:
        if id in groups and groups[id].gpus_per_replica == 0:
            faults.append(f"ring {ring.id!r}: {id!r} uses no GPU (gpus_per_replica=0); only GPU roles take turns")
    if not any(how == FALLBACK for _, how in ring.members):
        faults.append(
            f"ring {ring.id!r} has no FALLBACK member; someone must hold the GPUs while nobody asks (usually inference)"
        )
    elif sum(how == FALLBACK for _, how in ring.members) > 1:
        several = ", ".join(repr(id) for id, how in ring.members if how == FALLBACK)
        faults.append(
            f"ring {ring.id!r} has several FALLBACK members ({several}), which would not yield to one another; let one "
            "hold the GPUs while nobody asks, and make the others ON_DEMAND"
        )
    return faults


def _waited_for(id: str, groups: dict[str, ServiceGroup]) -> set[str]:
    """All groups that this one waits for, and that those wait for."""
    seen: set[str] = set()
    ahead = [id]
    while ahead:
        group = groups.get(ahead.pop())
        fresh = set(group.wait_for) - seen if group is not None else set()
        seen |= fresh
        ahead += fresh
    return seen


def colocation_faults(recipe: Recipe) -> list[str]:
    """Groups that would share the GPUs of one another in a circle."""
    hosts = {group.id: group.colocate_with for group in recipe.groups}
    circles = set()
    for id in hosts:
        seen = [id]
        while (other := hosts.get(seen[-1])) is not None and other not in seen:
            seen.append(other)
        if other == id:
            circles.add(", ".join(sorted(seen)))
    return [
        f"colocate_with goes round in a circle among {ids}; let one of them have GPUs of its own" for ids in circles
    ]


def wait_for_faults(recipe: Recipe) -> list[str]:
    """Groups that wait for one another in a circle."""
    waits = {group.id: set(group.wait_for) for group in recipe.groups}
    while True:
        free = [id for id, others in waits.items() if not others & waits.keys()]
        if not free:
            break
        for id in free:
            del waits[id]
    if not waits:
        return []
    return [f"wait_for goes round in a circle among {', '.join(sorted(waits))}; none of them could ever start"]
