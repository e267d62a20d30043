"""From a recipe file and a command line to a typed Recipe.

A recipe is a Python file that exports `RECIPE: Recipe`, or a function `recipe(**options) -> Recipe` whose typed
options become command-line settings. An option called `gpus` is filled with the number of GPUs (or CPU slots) of the
run, so that one file serves a laptop and a cluster. Every field can be set from the command line by its dotted path.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshy.importing import ImportPathError, load_file, nearest
from meshy.recipe import (
    ColocationRing,
    Recipe,
    RecipeError,
    Sampling,
    ServiceConfig,
    ServiceGroup,
)
from meshy.refusals import type_faults, type_name
from meshy.topology import FIRST_BASE_PORT, Gpu, Topology, derive_topology


def load_recipe(path: str | Path, settings: Mapping[str, str], gpus: int) -> Recipe:
    """The recipe of a file, with `settings` (dotted path -> text) applied and every field's type checked.

    Raises RecipeError with all faults: a missing file, a recipe that raises, no RECIPE, an unknown path, a wrong type.
    """
    recipe, misset, mistyped = _load(Path(path), settings, gpus)
    if faults := misset + mistyped:
        raise RecipeError(faults)
    return recipe


def resolve(
    path: str | Path, settings: Mapping[str, str], gpus: Sequence[Gpu], base_port: int | None = None
) -> tuple[Recipe, Topology]:
    """A recipe file and its topology on `gpus`; RecipeError with every fault found in either.

    base_port: where the ports begin; the recipe's own block, or the first there is, by default.
    """
    recipe, misset, mistyped = _load(Path(path), settings, len(gpus))
    faults = misset + mistyped
    try:
        if not mistyped:  # else derivation would stumble over them
            topology = derive_topology(recipe, gpus, base_port or recipe.base_port or FIRST_BASE_PORT)
    except RecipeError as error:
        faults += error.faults
    if faults:
        raise RecipeError(faults)
    return recipe, topology


def _load(file: Path, settings: Mapping[str, str], gpus: int) -> tuple[Recipe, list[str], list[str]]:
    """The recipe with those settings that fit; the faults of the other settings; the faults of its types."""
    if not file.is_file():
        near = nearest(file.name, [p.name for p in file.parent.glob("*.py")]) if file.parent.is_dir() else ""
        raise RecipeError([f"there is no recipe file {file}{near}"])
    module = _execute(file)
    if hasattr(module, "RECIPE"):
        recipe = module.RECIPE
    elif callable(getattr(module, "recipe", None)):
        recipe, settings = _call_recipe(file, module.recipe, dict(settings), gpus)
    else:
        raise RecipeError([f"{file} exports neither RECIPE nor a function recipe(...) -> Recipe; add one of them"])
    if not isinstance(recipe, Recipe):
        raise RecipeError([f"{file}: expected a meshy Recipe, got {type(recipe).__name__}"])
    if not recipe.name:
        recipe = dataclasses.replace(recipe, name=file.stem)
    recipe, faults = apply_settings(recipe, settings)
    return recipe, faults, type_faults(recipe)


def _execute(file: Path) -> types.ModuleType:
    try:
        return load_file(file)
    except ImportPathError as error:
        raise RecipeError([str(error)]) from error
    except (Exception, SystemExit) as error:
        raise RecipeError([_explain(file, error)]) from error


def _call_recipe(
    file: Path, function: Callable[..., Any], settings: dict[str, str], gpus: int
) -> tuple[Any, dict[str, str]]:
    """Call `recipe(**options)` with the settings that are its options; the rest stay settings."""
    hints = typing.get_type_hints(function)
    options: dict[str, Any] = {}
    faults: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name, str)
        if name in settings:
            try:
                options[name] = parse_text(settings.pop(name), hint)
            except ValueError as error:
                faults.append(f"{name}: {error}")
        elif name == "gpus":
            options[name] = gpus
        elif parameter.default is parameter.empty:
            faults.append(f"{name}: this recipe needs a value; add {name}=<{type_name(hint)}> to the command line")
    if faults:
        raise RecipeError(faults)
    try:
        return function(**options), settings
    except RecipeError:
        raise
    except (Exception, SystemExit) as error:
        raise RecipeError([_explain(file, error)]) from error


def _explain(file: Path, error: Exception | SystemExit) -> str:
    """One fault for an exception raised by a recipe's own code: the message, the line, and the nearest name."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == file.resolve()]
    line = (
        f", line {frames[-1].lineno}" if frames else f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
    )
    hint = ""
    unexpected = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if unexpected:
        classes = {c.__name__: c for c in (*_subclasses(ServiceConfig), Recipe, ServiceGroup, ColocationRing, Sampling)}
        if unexpected[1] in classes:
            hint = nearest(unexpected[2], [f.name for f in dataclasses.fields(classes[unexpected[1]])])
    detail = "".join(traceback.format_exception(error)).rstrip()
    return f"{file}{line}: {type(error).__name__}: {error}{hint}\n{detail}"


def _subclasses(base: type[Any]) -> Iterator[type[Any]]:
    children: list[type[Any]] = base.__subclasses__()
    for child in children:
        yield child
        yield from _subclasses(child)


# Settings from the command line ---------------------------------------------------------------------------------------

_FIXED = ("name", "groups", "rings")
_GROUP_FIELDS = ("replicas", "gpus_per_replica", "colocate_with", "wait_for")


def parse_settings(arguments: list[str]) -> dict[str, str]:
    """`["trainer.lr=1e-4", "--steps", "10", "--base-port=1"]` as {dotted path: text}; RecipeError for anything else."""
    settings: dict[str, str] = {}
    faults: list[str] = []
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        path, separator, text = argument.removeprefix("--").partition("=")
        if argument.startswith("--"):
            path = path.replace("-", "_")
        if not separator and argument.startswith("--") and queue:
            text, separator = queue.pop(0), "="
        if not separator or not path:
            faults.append(f"{argument!r}: write settings as path=value, for example trainer.batch_size=64")
        elif path in settings:
            faults.append(f"{path}: set twice, to {settings[path]!r} and to {text!r}")
        else:
            settings[path] = text
    if faults:
        raise RecipeError(faults)
    return settings


def apply_settings(recipe: Recipe, settings: Mapping[str, str]) -> tuple[Recipe, list[str]]:
    """The recipe with each dotted path set, and a fault for each that could not be."""
    faults: list[str] = []
    for path, text in settings.items():
        try:
            recipe = _set(recipe, path, text)
        except ValueError as error:
            faults.append(f"{path}: {error}")
    return recipe, faults


def _set(recipe: Recipe, path: str, text: str) -> Recipe:
    head, _, rest = path.partition(".")
    groups = {group.id: group for group in recipe.groups}
    own = [f.name for f in dataclasses.fields(Recipe) if f.name not in _FIXED]
    if head in own:
        return _replace(recipe, path.split("."), text)
    if head in groups:
        group = groups[head]
        if not rest:
            raise ValueError(f"{head!r} is a group; set one of its fields{_listing(_fields_of_group(group))}")
        name = rest.partition(".")[0]
        if name in _GROUP_FIELDS:
            changed = _replace(group, rest.split("."), text)
        elif name in {f.name for f in dataclasses.fields(group.config)}:
            changed = dataclasses.replace(group, config=_replace(group.config, rest.split("."), text))
        else:
            raise ValueError(f"no such field{_near(head, name, _fields_of_group(group))}")
        return dataclasses.replace(recipe, groups=tuple(changed if g.id == head else g for g in recipe.groups))
    every = [*own, *groups, *(f"{g.id}.{name}" for g in recipe.groups for name in _fields_of_group(g))]
    raise ValueError(f"no such field or group{nearest(path, every)}")


def _fields_of_group(group: ServiceGroup) -> list[str]:
    return [*_GROUP_FIELDS, *(f.name for f in dataclasses.fields(group.config))]


def _listing(names: list[str]) -> str:
    return f" ({', '.join(names)})"


def _near(prefix: str, name: str, names: list[str]) -> str:
    hint = nearest(name, names)
    return hint.replace("'", f"'{prefix}.", 1) if hint else f"; there are{_listing(names)}"


def _replace(value: Any, path: list[str], text: str) -> Any:
    """A copy of dataclass `value` in which the field at `path` is what `text` says."""
    name, rest = path[0], path[1:]
    names = [f.name for f in dataclasses.fields(value)]
    if name not in names:
        raise ValueError(f"no such field{nearest(name, names) or _listing(names)}")
    hint = typing.get_type_hints(type(value))[name]
    old = getattr(value, name)
    if not rest:
        new = parse_text(text, hint)
    elif dataclasses.is_dataclass(old):
        new = _replace(old, rest, text)
    elif isinstance(old, Mapping):
        new = {**old, ".".join(rest): parse_text(text, Any)}
    elif old is None and any(map(dataclasses.is_dataclass, typing.get_args(hint))):
        raise ValueError(f"{name!r} is none in this recipe; give it one there ({type_name(hint)}), then set its fields")
    else:
        raise ValueError(f"{name!r} is a {type_name(hint)} and has no field {'.'.join(rest)!r}")
    return dataclasses.replace(value, **{name: new})


_NUMBER = re.compile(r"[+-]?((\d*\.\d+|\d+\.)(e[+-]?\d+)?|inf)", re.IGNORECASE)
"""A number with a fraction, and those that are none in JSON: .5, 1., inf."""


def parse_text(text: str, hint: Any) -> Any:
    """The value of type `hint` that a command-line `text` stands for.

    Numbers and true/false as in JSON or Python, `none` where the type allows it, `a,b` for tuples, JSON for the rest.
    ValueError names the expected type.
    """
    from pydantic import TypeAdapter, ValidationError

    if text.lower() in ("none", "null") and (hint is Any or type(None) in typing.get_args(hint)):
        return None
    if hint is Any:
        try:
            return json.loads({"True": "true", "False": "false"}.get(text, text))
        except ValueError:
            return text
    adapter: TypeAdapter[Any] = TypeAdapter(hint)
    if _NUMBER.fullmatch(text) and (hint is float or float in typing.get_args(hint)):
        return float(text)
    attempts: tuple[Callable[[], Any], ...] = (
        lambda: adapter.validate_python(text, strict=True),
        lambda: adapter.validate_json({"True": "true", "False": "false"}.get(text, text), strict=True),
        lambda: adapter.validate_json(f"[{text}]", strict=True),
        lambda: adapter.validate_json(json.dumps([part for part in text.split(",") if part]), strict=True),
    )
    for attempt in attempts:
        try:
            return attempt()
        except ValidationError:
            continue
    raise ValueError(f"expected {type_name(hint)}, got {text!r}")
