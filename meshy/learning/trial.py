"""Functions that a recipe names, tried before anything is spawned. Those of tokens are given columns without any, as by
a rank without rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

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
    """Of an estimator of samples. numbers: columns that it may read."""

    def call() -> None:
        for rewards in _rewards(group_size)[:2]:
            inputs = _samples(rewards, numbers, group_size)
            output = _expect(load(target)(inputs, **options), AdvantageOutput)
            check_numbers("advantages", output.advantages, rewards)

    return _tried(field, f"{field}_options", target, call)


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


def learns_nothing(
    advantage: Callable[..., AdvantageOutput] | None,
    token_advantage: Callable[..., TokenAdvantages] | None,
    numbers: Sequence[str],
    columns: Sequence[Column],
    group_size: int,
) -> bool:
    """Whether these estimators, which have been tried, give every token an advantage of 0, whatever its reward."""
    if advantage is None and token_advantage is None:
        return True
    try:
        for rewards in _rewards(group_size):
            advantages = torch.zeros_like(rewards)
            if advantage is not None:
                advantages = advantage(_samples(rewards, numbers, group_size)).advantages
            if token_advantage is not None:
                advantages = token_advantage(_tokens(rewards, advantages, columns)).advantages
            if bool(advantages.any()):
                return False
    except Exception:  # noqa: BLE001 - an estimator may refuse rewards or columns that are not those of the run
        return False
    return True


def _rewards(group_size: int) -> list[Tensor]:
    """Rewards of some groups: all alike, right and wrong, and others of several scales."""
    count = torch.arange(float(GROUPS * group_size))
    return [torch.zeros_like(count), count % 2, count + 1, 1000 * (count + 1), -1 - count]


def _samples(rewards: Tensor, numbers: Iterable[str], group_size: int) -> AdvantageInputs:
    return AdvantageInputs(
        rewards=rewards,
        groups=torch.arange(GROUPS).repeat_interleave(group_size),
        columns={name: torch.arange(float(len(rewards))) + 1 for name in numbers},
    )


def _tokens(rewards: Tensor, advantages: Tensor, columns: Iterable[Column]) -> TokenInputs:
    """Responses of two tokens."""
    n = 2 * len(rewards)
    numbers = torch.linspace(-2.0, -1.0, n)
    return TokenInputs(
        rewards=torch.stack([torch.zeros_like(rewards), rewards], 1).flatten(),
        advantages=advantages.repeat_interleave(2),
        rollout_logprobs=numbers.flip(0),
        sequence=torch.arange(len(rewards)).repeat_interleave(2),
        columns={
            c.name: (numbers[:, None].expand(n, 4) if c.kind == "jagged2d" else numbers).to(getattr(torch, c.dtype))
            for c in columns
        },
    )


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
