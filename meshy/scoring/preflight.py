"""What is wrong with a model that scores, as seen from the host on which it will run, before anything is spawned."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from meshy.columns import PER_TOKEN, TRAIN
from meshy.contract import derive_contract
from meshy.models import ModelError, folder_faults, model_folder, vocabulary_size, weight_headers
from meshy.recipe import Recipe
from meshy.scoring.config import ModelOptions, TeacherConfig
from meshy.scoring.critic_config import CriticConfig
from meshy.scoring.reward_model_config import RewardModelConfig
from meshy.scoring.tokenizers import (
    TokenMapError,
    first_difference,
    load_token_map,
    token_map_faults,
    tokens_by_id,
)
from meshy.trainable import VALUE, backend_faults, loading_faults


def model_faults(config: ModelOptions, recipe: Recipe, *, value_head: bool = False) -> list[str]:
    """Whether the model can be had, is whole, can be loaded and takes rows of the run's length. value_head: see
    `loading_faults`."""
    faults = backend_faults(config.spmd_backend)
    if config.model is None:
        return faults  # it is the run's own, of which the ignitor and the trainer say what is wrong
    try:
        folder = model_folder(config.model)
        found = folder_faults(folder) or loading_faults(folder, recipe.context_length, value_head=value_head)
    except ModelError as error:
        found = [str(error)]
    return faults + [f"model: {fault}" for fault in found]


def teacher_faults(config: TeacherConfig, recipe: Recipe) -> list[str]:
    """Every fault of a teacher or a reference."""
    faults = model_faults(config, recipe)
    try:
        policy = model_folder(recipe.model)
        own = policy if config.model is None else model_folder(config.model)
        sizes = vocabulary_size(policy), vocabulary_size(own)
    except ModelError:
        return faults  # it has been said, by the ignitor or above
    if faults:
        return faults
    return _size_faults(config, *sizes) + _map_faults(config, policy, own, *sizes)


def _size_faults(config: TeacherConfig, policy_vocab: int, own_vocab: int) -> list[str]:
    faults = []
    least = min(policy_vocab, own_vocab)
    if "topk" in config.scores and config.k > least:
        faults.append(f"k: expected at most {least}, the size of the vocabulary, got {config.k}")
    if policy_vocab > own_vocab and config.token_map is None:
        faults.append(
            f"model: it has {own_vocab} token ids and the policy {policy_vocab}, so it could not read all that the "
            "policy may write; take a model of at least as many, or give a token_map"
        )
    return faults


def _map_faults(config: TeacherConfig, policy: Path, own: Path, policy_vocab: int, own_vocab: int) -> list[str]:
    if config.token_map is None:
        return tokenizer_faults(policy, own, "or give a token_map from the policy's ids to this model's")
    try:
        entries = load_token_map(config.token_map, policy, own)
    except TokenMapError as error:
        return [f"token_map: {error}"]
    return token_map_faults(entries, policy_vocab, own_vocab)


def tokenizer_faults(policy: Path, own: Path, else_: str = "") -> list[str]:
    """A fault where a model reads other tokens than the policy writes. else_: what can be done about it beside taking
    another model."""
    if own == policy:
        return []
    try:
        differs = first_difference(tokens_by_id(policy), tokens_by_id(own))
    except ModelError as error:
        return [f"model: {error}"]
    if differs is None:
        return []
    id, theirs, ours = differs
    return [
        f"model: its tokenizer is not the policy's: id {id} is {_told(theirs)} in {policy} and {_told(ours)} in {own}; "
        "take a model of the same tokenizer" + (f", {else_}" if else_ else "")
    ]


def _told(token: str | None) -> str:
    return "no token" if token is None else repr(token)


def reward_model_faults(config: RewardModelConfig, recipe: Recipe) -> list[str]:
    """Every fault of a reward model: it must have a head of one number that was trained, and read what the policy
    writes."""
    if faults := model_faults(config, recipe, value_head=True):
        return faults
    own = model_folder(config.model)
    faults = head_faults(own)
    try:
        policy = model_folder(recipe.model)
    except ModelError:
        return faults  # the ignitor says so
    return faults + tokenizer_faults(policy, own)


def critic_faults(config: CriticConfig, recipe: Recipe) -> list[str]:
    """Every fault of a critic: what it reads are the policy's tokens, what it learns are returns that the trainer's
    estimator makes of the critic's own columns."""
    faults = model_faults(config, recipe, value_head=True)
    if not faults and config.model is not None:
        with suppress(ModelError):  # of the policy; the ignitor says so
            faults += tokenizer_faults(model_folder(recipe.model), model_folder(config.model))
    return faults + _returns_faults(config, recipe)


def _returns_faults(config: CriticConfig, recipe: Recipe) -> list[str]:
    from meshy.learning import trial

    trainer = config.trainer(recipe)
    contract, misfits = derive_contract(recipe.declarations())
    if misfits or trainer is None:
        return []  # they are said elsewhere
    estimator, options = trainer.token_advantage, trainer.token_advantage_options
    field = "what the trainer's token_advantage makes of the critic's columns"
    if estimator is None or trial.loading_faults(field, estimator, options):
        return []
    columns = config.of_tokens(recipe, contract.partition(TRAIN)).values()
    if wrong := [c for c in columns if c.kind not in PER_TOKEN or c.dtype in ("str", "object")]:
        return [f"also_consumes: {c.name} is {c.type}, and a critic reads numbers of tokens" for c in wrong]
    return trial.token_advantage_faults(field, estimator, options, columns, returns=True)


def head_faults(folder: Path) -> list[str]:
    """A fault where a folder's weights hold no head that gives one number a token."""
    if VALUE in weight_headers(folder):
        return []
    return [
        f"model: the weights in {folder} hold no {VALUE}, the head by which a sequence classifier gives its number; "
        "take a reward model that was trained as one (transformers' ...ForSequenceClassification)"
    ]
