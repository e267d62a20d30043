"""Functions that a recipe names, tried before anything is spawned. Those of tokens are given columns without any, as by
a rank without rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from meshy.algorithms.interface import (
    AdvantageInputs,
    AdvantageOutput,
    GlobalCounts,
    LossConfig,
    LossInputs,
    LossOutput,
    TokenAdvantages,
    TokenInputs,
)
from meshy.algorithms.options import OptionError, check_option
from meshy.columns import Column
from meshy.importing import ImportPathError, load, nearest, path_of
from meshy.learning.blank import without_tokens
from meshy.learning.numbers import check_numbers

Target = str | Callable[..., Any]
GROUPS = 2


def loading_faults(field: str, target: Target | None, options: Mapping[str, Any] | None = None) -> list[str]:
    """Of a function that cannot be had, or does not take these options. field: where the recipe names it."""
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
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # of some functions that are not written in Python
        return []
    known, faults = list(parameters)[1:], []
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, value in (options or {}).items():
        if name in known:
            try:
                check_option(path_of(target), name, value, parameters[name].default)
            except OptionError as error:
                faults.append(f"{field}_options.{name}: {error}")
        elif not anything:
            faults.append(
                f"{field}_options.{name}: {path_of(target)} has no such option{nearest(name, known)}; it has "
                f"{', '.join(known) or 'none'}"
            )
    return faults


def loss_faults(
    field: str, options_field: str, target: Target, config: LossConfig, columns: Iterable[Column]
) -> list[str]:
    """Of a loss, or a term of it. columns: per-token ones that it may read."""
    none = torch.zeros(0)
    inputs = LossInputs(
        logprobs=none.clone().requires_grad_(),
        old_logprobs=none,
        rollout_logprobs=none,
        advantages=none,
        sequence=torch.zeros(0, dtype=torch.long),
        counts=GlobalCounts(tokens=1, sequences=1),
        columns={column.name: without_tokens(column) for column in columns},
        logits=torch.zeros(0, 2).requires_grad_(),
    )

    def call() -> None:
        loss = _expect(load(target)(inputs, config), LossOutput).loss
        if loss.shape != () or not loss.requires_grad or not bool(loss.isfinite()):
            raise ValueError(
                f"it gave a loss of shape {list(loss.shape)} and value {loss.detach()}; expected one finite number "
                "with a gradient, where no token is left, too"
            )

    return _tried(field, options_field, target, call)


def advantage_faults(
    field: str, target: Target, options: Mapping[str, Any], numbers: Iterable[str], group_size: int
) -> list[str]:
    """Of an estimator of samples; also where it gives none of them an advantage although their rewards differ.
    numbers: columns that it may read."""
    size = GROUPS * group_size
    advantages = torch.zeros(size)

    def call() -> None:
        nonlocal advantages
        for rewards in (torch.zeros(size), torch.arange(size) % 2.0):
            inputs = AdvantageInputs(
                rewards=rewards,
                groups=torch.arange(GROUPS).repeat_interleave(group_size),
                columns={name: torch.zeros(size) for name in numbers},
            )
            advantages = _expect(load(target)(inputs, **options), AdvantageOutput).advantages
            check_numbers("advantages", advantages, rewards)

    faults = _tried(field, f"{field}_options", target, call)
    if faults or bool(advantages.any()):
        return faults
    return [
        f"{field}: {path_of(target)} gives every sample of groups of {group_size} an advantage of 0, though their "
        "rewards differ; set group_size to more, or take another"
    ]


def token_advantage_faults(
    field: str, target: Target, options: Mapping[str, Any], columns: Iterable[Column], *, returns: bool = False
) -> list[str]:
    """Of an estimator of tokens. columns: per-token ones that it may read. returns: whether somebody learns from its
    returns."""
    none = torch.zeros(0)
    inputs = TokenInputs(
        rewards=none,
        advantages=none,
        rollout_logprobs=none,
        sequence=torch.zeros(0, dtype=torch.long),
        columns={column.name: without_tokens(column) for column in columns},
    )

    def call() -> None:
        output = _expect(load(target)(inputs, **options), TokenAdvantages)
        check_numbers("advantages", output.advantages, none)
        if output.returns is not None:
            check_numbers("returns", output.returns, none)
        elif returns:
            raise ValueError(
                "it gives no returns, and a critic learns from them; take meshy.algorithms.advantages.gae:gae_advantage"
            )

    return _tried(field, f"{field}_options", target, call)


def _expect(output: Any, kind: type) -> Any:
    if not isinstance(output, kind):
        raise TypeError(f"it returned a {type(output).__name__}, not a {kind.__name__}")
    return output


def _tried(field: str, options_field: str, target: Target, call: Callable[[], None]) -> list[str]:
    try:
        call()
    except OptionError as error:
        return [f"{options_field}.{error.name}: {error}"]
    except Exception as error:  # noqa: BLE001 - whatever a function of the user raises
        name = type(error).__name__
        return [f"{field}: {path_of(target)} raised {name} when it was tried: {error}"]
    return []
