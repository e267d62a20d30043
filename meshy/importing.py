"""Names of code that travel between processes: `package.module:attribute` or `path/to/file.py:attribute`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


class ImportPathError(ValueError):
    """An import path that leads nowhere; the message says which half is wrong and what would fit."""


def load(target: str | Callable[..., Any]) -> Any:
    """The object that `target` names. A callable is returned as it is.

    Raises ImportPathError when the module or the attribute is not there. An error raised by the module's own code
    while it is imported is passed on unchanged, so that its traceback is seen.
    """
    if not isinstance(target, str):
        return target
    module_name, separator, attribute = target.rpartition(":")
    if not separator or not module_name or not attribute:
        raise ImportPathError(f"{target!r} is no import path; write 'package.module:name' or 'path/to/file.py:name'")
    module = load_file(module_name) if module_name.endswith(".py") else _load_module(module_name, target)
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise ImportPathError(f"{target!r}: {module_name} has no {attribute!r}{nearest(attribute, vars(module))}")
        value = getattr(value, part)
    return value


def _load_module(name: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ImportPathError(
                f"{target!r}: there is no module {error.name!r} (looked in the working folder and the environment)"
            ) from error
        raise


def load_file(path: str | Path) -> ModuleType:
    """Import a Python file by its path, once per process; its folder's modules are importable from it."""
    file = Path(path).resolve()
    if not file.is_file():
        raise ImportPathError(f"there is no file {file}")
    name = f"meshy_file_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportPathError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution: dataclasses look their module up here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def path_of(target: str | Callable[..., Any]) -> str:
    """The import path of a callable, such that another process can `load` it. A string is returned as it is.

    Raises ImportPathError for what has no name of its own at module level (lambdas, closures, bound methods).
    """
    if isinstance(target, str):
        return target
    name = getattr(target, "__qualname__", "")
    module = sys.modules.get(getattr(target, "__module__", ""))
    if module is None or not name or "<" in name or getattr(target, "__self__", None) is not None:
        raise ImportPathError(
            f"{target!r} cannot be named from another process; define it with `def` at the top level of a file"
        )
    file = getattr(module, "__file__", None)
    if file and (module.__name__.startswith("meshy_file_") or module.__name__ == "__main__"):
        return f"{Path(file).resolve()}:{name}"
    return f"{module.__name__}:{name}"


def nearest(name: str, names: Any) -> str:
    """A hint ` (did you mean 'x'?)` with the known name closest to `name`; empty when none is close."""
    import difflib

    close = difflib.get_close_matches(name, [str(n) for n in names], n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
