"""What is wrong with the model that a trainer is to train and the functions that it is told to use, seen before
anything is spawned."""

from __future__ import annotations

from functools import partial

from meshy.columns import TRAIN
from meshy.contract import derive_contract
from meshy.importing import load, path_of
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
    """Estimators, losses and terms that cannot be loaded, do not take the options given for them, read columns that
    the trainer does not wait for, or do not give what is asked of them."""
    from meshy.learning import trial

    faults = [
        *trial.loading_faults("advantage", config.advantage, config.advantage_options),
        *trial.loading_faults("token_advantage", config.token_advantage, config.token_advantage_options),
        *trial.loading_faults("loss", config.loss),
    ]
    for index, term in enumerate(config.terms):
        faults += trial.loading_faults(f"terms[{index}].loss", term.loss)
    return faults or _level_faults(config) or _trial_faults(config, recipe)


def _level_faults(config: TrainerConfig) -> list[str]:
    """An estimator of tokens where one of samples belongs, or the other way round, or one that does not see what is
    taken from the rewards."""
    faults, refined = [], config.token_advantage
    if refined is not None and not getattr(load(refined), "per_token", False):
        faults.append(
            f"token_advantage: {path_of(refined)} takes whole samples, or lacks the mark @per_token of "
            "meshy.algorithms.interface; name it as advantage, or mark it"
        )
    if refined is not None and config.kl_in_reward is not None and getattr(load(refined), "ignores_rewards", False):
        faults.append(
            f"kl_in_reward: {path_of(refined)} does not read the rewards of tokens; take another token_advantage, or "
            "take the KL into the loss, as one of `terms`"
        )
    if config.advantage is not None and getattr(load(config.advantage), "per_token", False):
        faults.append(f"advantage: {path_of(config.advantage)} takes tokens; name it as token_advantage")
    return faults


def _trial_faults(config: TrainerConfig, recipe: Recipe) -> list[str]:
    from meshy.learning import trial
    from meshy.training.settings_of_loss import loss_config

    contract, misfits = derive_contract(recipe.declarations())
    if misfits:
        return []  # they are said elsewhere
    further = Further.of(config.further_columns, contract.partition(TRAIN))
    columns = further.tokens.values()
    settings = loss_config(config, config.loss_options)
    faults = trial.loss_faults("loss", "loss_options", config.loss, settings, columns)
    for index, term in enumerate(config.terms):
        where, settings = f"terms[{index}]", loss_config(config, term.options)
        faults += trial.loss_faults(f"{where}.loss", f"{where}.options", term.loss, settings, columns)
    size = min(config.group_sizes(recipe), default=2)
    if config.advantage is not None:
        options = config.advantage_options
        faults += trial.advantage_faults("advantage", config.advantage, options, further.numbers, size)
    if config.token_advantage is not None:
        options = config.token_advantage_options
        faults += trial.token_advantage_faults("token_advantage", config.token_advantage, options, columns)
    return faults or _nothing_faults(config, further, size)


def _nothing_faults(config: TrainerConfig, further: Further, group_size: int) -> list[str]:
    """Where there is nothing that could be learned."""
    from meshy.learning import trial

    if config.terms or not getattr(load(config.loss), "vanishes_at_zero_advantage", False):
        return []
    named = {
        "advantage": (config.advantage, config.advantage_options),
        "token_advantage": (config.token_advantage, config.token_advantage_options),
    }
    bound = {name: None if one is None else partial(load(one), **options) for name, (one, options) in named.items()}
    if not trial.learns_nothing(
        **bound, numbers=further.numbers, columns=tuple(further.tokens.values()), group_size=group_size
    ):
        return []
    given = " and ".join(path_of(one) for one, _ in named.values() if one is not None)
    why = f": {given} gives 0 for every sample of groups of {group_size}, though their rewards differ" if given else ""
    return [
        f"loss: {path_of(config.loss)} learns from advantages, and there are none{why}; set group_size, advantage or "
        "token_advantage otherwise, or take a loss that learns from other columns"
    ]
