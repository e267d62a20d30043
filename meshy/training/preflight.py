"""What is wrong with the functions that a trainer is told to use, seen before anything is spawned."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from meshy.importing import ImportPathError, load, nearest, path_of
from meshy.training.config import TrainerConfig


def function_faults(config: TrainerConfig) -> list[str]:
    """Estimators, losses and terms that cannot be loaded, or do not take the options given for them."""
    faults = [
        *_faults("advantage", config.advantage, config.advantage_options),
        *_faults("token_advantage", config.token_advantage, config.token_advantage_options),
        *_faults("loss", config.loss),
    ]
    for index, term in enumerate(config.terms):
        faults += _faults(f"terms[{index}].loss", term.loss)
    return faults or _level_faults(config)


def _faults(field: str, target: str | Callable[..., Any] | None, options: Mapping[str, Any] | None = None) -> list[str]:
    if target is None:
        return []
    try:
        function = load(target)
    except ImportPathError as error:
        return [f"{field}: {error}"]
    except Exception as error:  # noqa: BLE001 - whatever a module of the user raises
        return [f"{field}: importing {path_of(target)} raised {type(error).__name__}: {error}"]
    if not callable(function):
        return [
            f"{field}: {path_of(target)} is a {type(function).__name__}; name a function (see algorithms/interface.py)"
        ]
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    known = list(parameters)[1:]
    return [
        f"{field}_options.{name}: {path_of(target)} has no such option{nearest(name, known)}; it has "
        f"{', '.join(known) or 'none'}"
        for name in options or {}
        if name not in known
    ]


def _level_faults(config: TrainerConfig) -> list[str]:
    """An estimator of tokens where one of samples belongs, or the other way round."""
    faults = []
    if config.token_advantage is not None and not getattr(load(config.token_advantage), "per_token", False):
        faults.append(
            f"token_advantage: {path_of(config.token_advantage)} takes whole samples, or lacks the mark @per_token of "
            "meshy.algorithms.interface; name it as advantage, or mark it"
        )
    if config.advantage is not None and getattr(load(config.advantage), "per_token", False):
        faults.append(f"advantage: {path_of(config.advantage)} takes tokens; name it as token_advantage")
    return faults
