"""From configuration to a learner. Importing this imports TorchTitan."""

from collections.abc import Mapping
from pathlib import Path

from meshy.columns import Column
from meshy.importing import load
from meshy.recipe import Recipe
from meshy.spmd.groups import ProcessGroups
from meshy.titan.build import build_engine, micro_batch_tokens
from meshy.training.config import TrainerConfig
from meshy.training.learner import Learner, Term
from meshy.training.settings_of_loss import loss_config


def build_learner(
    config: TrainerConfig, model: Path, recipe: Recipe, groups: ProcessGroups, columns: Mapping[str, Column]
) -> Learner:
    """Builds the engine on every rank (collective) and joins it with the loss that the configuration names. columns:
    see `Learner`."""
    engine = build_engine(config, model, recipe, activation_checkpointing=config.activation_checkpointing)
    return Learner(
        engine=engine,
        groups=groups,
        loss=load(config.loss),
        loss_config=loss_config(config, config.loss_options),
        terms=tuple(
            Term(term.label, load(term.loss), loss_config(config, term.options), term.weight) for term in config.terms
        ),
        temperature=recipe.sampling.temperature,
        micro_batch_tokens=micro_batch_tokens(config, recipe),
        old_logprobs=config.old_logprobs,
        correction=config.correction,
        columns=columns,
    )
