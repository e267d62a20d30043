"""Which engine a replica runs, and why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshy.inference.config import InferenceConfig
from meshy.inference.sglang.arguments import VERSION
from meshy.inference.sglang.interpreter import installed_here, installed_version, interpreter


@dataclass(frozen=True)
class Choice:
    """python: the interpreter that runs SGLang; for the embedded engine it means nothing."""

    engine: Literal["embedded", "sglang"]
    why: str
    python: Path


def choose(config: InferenceConfig, on_gpu: bool) -> Choice:
    """`auto` takes SGLang where there is a GPU and the supported version is installed, in this interpreter or in the
    one that the configuration names. Raises InterpreterError where a named interpreter cannot be asked.
    """
    python = interpreter(config.python)
    if config.engine == "embedded":
        return Choice("embedded", "the recipe names it", python)
    if config.engine == "sglang":
        return Choice("sglang", "the recipe names it", python)
    if not on_gpu:
        return Choice("embedded", "auto: there is no GPU", python)
    if config.python is None and not installed_here():
        return Choice("embedded", "auto: SGLang is not installed in this interpreter", python)
    version = installed_version(python)
    if version != VERSION:
        return Choice("embedded", f"auto: {python} has SGLang {version}, and {VERSION} is supported", python)
    return Choice("sglang", f"auto: there is a GPU, and {python} has SGLang {version}", python)
