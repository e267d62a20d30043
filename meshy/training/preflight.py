"""What is wrong with the model that a trainer is to train and the functions that it is told to use, seen before
anything is spawned."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from meshy.columns import TRAIN, derive_contract
from meshy.importing import ImportPathError, load, nearest, path_of
from meshy.models import ModelError, folder_faults, model_folder
from meshy.recipe import Recipe
from meshy.trainable import backend_faults, loading_faults
from meshy.training.config import TrainerConfig
from meshy.training.further import Further


def model_faults(config: TrainerConfig, recipe: Recipe) -> list[str]:
    """Of the run's own model, beyond what keeps its folder from being whole, which the ignitor says."""
    faults = backend_faults(config.spmd_backend)
    try:
        folder = model_folder(recipe.model)
        found = [] if folder_faults(folder) else loading_faults(folder, recipe.context_length)
    except ModelError:
        return faults
    return faults + [f"cannot train the run's model: {fault}" for fault in found]


def function_faults(config: TrainerConfig, recipe: Recipe) -> list[str]:
    """Estimators, losses and terms that cannot be loaded, do not take the options given for them, or read columns that
    the trainer does not wait for."""
    faults = [
        *_faults("advantage", config.advantage, config.advantage_options),
        *_faults("token_advantage", config.token_advantage, config.token_advantage_options),
        *_faults("loss", config.loss),
    ]
    for index, term in enumerate(config.terms):
        faults += _faults(f"terms[{index}].loss", term.loss)
    return faults or _level_faults(config) or _trial_faults(config, recipe)


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


def _trial_faults(config: TrainerConfig, recipe: Recipe) -> list[str]:
    """What each function says to a micro-batch without a token, which a rank without work has, too."""
    import torch

    from meshy.algorithms.interface import AdvantageInputs, GlobalCounts, LossConfig, LossInputs, TokenInputs

    contract, misfits = derive_contract(recipe.declarations())
    if misfits:
        return []  # they are said elsewhere
    further = Further.of(config.further_columns, contract.partition(TRAIN))
    none, nobody = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    columns = {
        name: torch.zeros((0, 0) if c.kind == "jagged2d" else (0,), dtype=getattr(torch, c.dtype))
        for name, c in further.tokens.items()
    }
    inputs = LossInputs(
        logprobs=none.clone().requires_grad_(),
        old_logprobs=none,
        rollout_logprobs=none,
        advantages=none,
        sequence=nobody,
        counts=GlobalCounts(tokens=1, sequences=1),
        columns=columns,
        logits=torch.zeros(0, 2).requires_grad_(),
    )
    faults = []

    def tried(field: str, target: str | Callable[..., Any], *given: Any, **options: Any) -> None:
        try:
            load(target)(*given, **options)
        except Exception as error:  # noqa: BLE001 - whatever a function of the user raises
            name = type(error).__name__
            faults.append(f"{field}: {path_of(target)} raised {name} when it was tried without tokens: {error}")

    settings = LossConfig(aggregation=config.aggregation, aggregation_constant=config.aggregation_constant)
    tried("loss", config.loss, inputs, dataclasses.replace(settings, options=config.loss_options))
    for index, term in enumerate(config.terms):
        tried(f"terms[{index}].loss", term.loss, inputs, dataclasses.replace(settings, options=term.options))
    if config.advantage is not None:
        samples = AdvantageInputs(
            rewards=torch.zeros(2),
            groups=torch.zeros(2, dtype=torch.long),
            columns={name: torch.zeros(2) for name in further.numbers},
        )
        tried("advantage", config.advantage, samples, **config.advantage_options)
    if config.token_advantage is not None:
        tokens = TokenInputs(rewards=none, advantages=none, rollout_logprobs=none, sequence=nobody, columns=columns)
        tried("token_advantage", config.token_advantage, tokens, **config.token_advantage_options)
    return faults
