"""Which Python runs SGLang, and what is installed there."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import meshy
from meshy.inference.sglang import probe
from meshy.inference.sglang.arguments import VERSION

OF_THE_CHECKOUT = Path(meshy.__file__).parents[1] / ".venv-sglang" / "bin" / "python"  # what `make sglang` sets up
PROBE_DEADLINE = 180.0  # seconds; importing SGLang takes 10 on an idle machine
HOW_TO_INSTALL = (
    f"install it there (`pip install sglang=={VERSION}`), or run `make sglang` in Meshy's checkout, which sets up "
    ".venv-sglang; inference.python names another interpreter"
)


class InterpreterError(RuntimeError):
    """An interpreter that cannot be run or asked; the message says what to change."""


def interpreter(named: str | None) -> Path:
    """The one that is named; else this one if SGLang is installed in it, else the checkout's .venv-sglang if there.

    A path is not resolved: a virtual environment's python is a link, and what it is a link to lacks the environment.
    """
    if named is not None:
        return Path(named).expanduser().absolute()
    if not installed_here() and OF_THE_CHECKOUT.is_file():
        return OF_THE_CHECKOUT
    return Path(sys.executable)


def installed_here() -> bool:
    try:
        importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def ask(python: Path, **request: Any) -> dict[str, Any]:
    """What `probe` finds in that interpreter. Raises InterpreterError."""
    return _ask(python, json.dumps({"version": VERSION, "names": [], "architectures": [], "gpu": False, **request}))


@cache
def _ask(python: Path, request: str) -> dict[str, Any]:
    if not python.is_file():
        raise InterpreterError(f"python: there is no interpreter {python}; {HOW_TO_INSTALL}")
    # Its text is passed, for as a file it would put its folder in front of what that interpreter imports.
    command = [str(python), "-c", Path(probe.__file__).read_text(), request]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_DEADLINE, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise InterpreterError(f"python: {python} cannot be run ({error}); name a Python interpreter") from error
    except subprocess.TimeoutExpired as error:
        raise InterpreterError(
            f"python: {python} did not import SGLang within {PROBE_DEADLINE:.0f} s; is its disk very slow?"
        ) from error
    if done.returncode != 0:
        last = "\n".join(done.stderr.strip().splitlines()[-8:])
        raise InterpreterError(
            f"python: SGLang in {python} cannot be asked (exit code {done.returncode}); its last lines:\n{last}"
        )
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


def installed_version(python: Path) -> str | None:
    """SGLang's version there, None where it is not installed. Raises InterpreterError."""
    version = ask(python)["version"]
    return None if version is None else str(version)
