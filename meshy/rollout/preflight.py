"""What is wrong with a run's data, reward, filter and routes, seen on the host before anything is spawned. Torch-free
and quick.

Prompts are counted here without the chat template, which would cost an import of transformers; the service counts
exactly when it starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshy.data.prompts import embedded_ids, longest
from meshy.data.task import Example, Task
from meshy.importing import ImportPathError, load, nearest, path_of
from meshy.models import ModelError, model_folder
from meshy.recipe import Recipe

if TYPE_CHECKING:
    from meshy.rollout.config import RolloutConfig

LONGEST_PROMPTS = 64


class DataError(ValueError):
    """Data that cannot be loaded; the message says what to change."""


def load_task(recipe: Recipe) -> Task:
    """The task of a recipe. DataError where the factory cannot be found, raises, or returns something else."""
    factory = _function("data", recipe.data, "that returns a Task")
    try:
        task = factory(**{"seed": recipe.seed, **recipe.data_options})
    except Exception as error:
        options = ", ".join(recipe.data_options) or "none"
        raise DataError(
            f"data: {name_of(recipe.data)} raised {type(error).__name__}: {error} (data_options given: {options})"
        ) from error
    if not isinstance(task, Task):
        raise DataError(f"data: {name_of(recipe.data)} returned a {type(task).__name__}; it must return a meshy Task")
    return task


def data_faults(config: RolloutConfig, recipe: Recipe) -> list[str]:
    """Every fault of the data, the reward, the filter, the routes and the prompts' lengths."""
    try:
        task = load_task(recipe)
    except DataError as error:
        return [str(error)]
    faults = reward_faults(config.reward or task.reward) + filter_faults(config.group_filter)
    faults += size_faults(config, recipe, task)
    for split, examples in (("train", task.train), ("evaluation", task.evaluation)):
        faults += message_faults(task.name, split, examples)
    if faults:
        return faults
    return route_faults(config, task) + overlap_faults(task) + _model_faults(config, recipe, task)


def size_faults(config: RolloutConfig, recipe: Recipe, task: Task) -> list[str]:
    prompts, there = config.prompts_per_batch(recipe), len(task.train)
    if there == 0:
        return [f"data: task {task.name!r} has no training prompt; check data_options"]
    faults = []
    if there < prompts and not config.allow_repeats:
        faults.append(
            f"data: task {task.name!r} has {there} training prompts, but a batch of {recipe.batch_size} samples in "
            f"groups of {config.group_size} takes {prompts}; give it more, lower the trainer's batch_size to at most "
            f"{there * config.group_size}, or set allow_repeats=true"
        )
    if config.evaluate and len(task.evaluation) == 0:
        faults.append(f"data: task {task.name!r} has no evaluation prompt; give it some, or set evaluate=false")
    return faults


def message_faults(task: str, split: str, examples: Sequence[Example]) -> list[str]:
    """One fault for all examples whose messages are no chat; it counts them and shows the first."""
    bad = [row for row, example in enumerate(examples) if not _is_chat(example)]
    if not bad:
        return []
    return [
        f"data: {len(bad)} of {len(examples)} {split} prompts of task {task!r} are no list of messages with a 'role' "
        f"and a 'content'; the first is row {bad[0]}: {examples[bad[0]]!r:.300}"
    ]


def _is_chat(example: Any) -> bool:
    if not isinstance(example, Example) or not isinstance(example.messages, (list, tuple)) or not example.messages:
        return False
    return all(hasattr(m, "keys") and isinstance(m.get("role"), str) and "content" in m for m in example.messages)


def overlap_faults(task: Task) -> list[str]:
    """A fault where an evaluation prompt also stands in train: its accuracy would not tell what was learned."""
    train = {_key(example) for example in task.train}
    shared = [example for example in task.evaluation if _key(example) in train]
    if not shared:
        return []
    return [
        f"data: {len(shared)} of {len(task.evaluation)} evaluation prompts of task {task.name!r} also stand in train; "
        f"take them out of one of the two. The first is {shared[0].id!r}: {shared[0].messages[-1]['content']!r:.200}"
    ]


def _key(example: Example) -> str:
    return json.dumps([dict(message) for message in example.messages], sort_keys=True, default=str)


def reward_faults(reward: str | Callable[..., Any]) -> list[str]:
    """A fault where the reward's worker processes could not load it."""
    try:
        _function("reward", path_of(reward), "of one RewardSample")
    except (DataError, ImportPathError) as error:
        return [str(error)]
    return []


def filter_faults(group_filter: str | Callable[..., Any] | None) -> list[str]:
    """A fault where the filter of groups cannot be loaded."""
    if group_filter is None:
        return []
    try:
        _function("group_filter", group_filter, "of the rewards of a group")
    except DataError as error:
        return [str(error)]
    return []


def route_faults(config: RolloutConfig, task: Task) -> list[str]:
    """Faults where the function that names routes cannot be loaded or raises, where it names others than `routes`, and
    where no training prompt has a route."""
    if not config.routes:
        return []
    try:
        route_of = _function("route_by", config.route_by, "from an example to the name of its route, or None")
    except DataError as error:
        return [str(error)]
    raised, unknown, seen = [], [], set()
    for example in task.train:
        try:
            route = route_of(example)
        except Exception as error:  # noqa: BLE001 - whatever the function raises is shown
            raised.append((example.id, f"{type(error).__name__}: {error}"))
            continue
        if route in config.routes:
            seen.add(route)
        elif route is not None:
            unknown.append((example.id, route))
    name, of = name_of(config.route_by), f"of {len(task.train)} training prompts of task {task.name!r}"
    faults = []
    if raised:
        id, why = raised[0]
        faults.append(
            f"route_by: {name} raised for {len(raised)} {of}; the first is {id!r}: {why}; let it return None for a "
            "prompt that has no route"
        )
    if unknown:
        id, route = unknown[0]
        faults.append(
            f"route_by: {name} gives {len(unknown)} {of} a route that is not in routes ({', '.join(config.routes)}); "
            f"the first is {id!r}: {route!r}{nearest(str(route), config.routes)}; add it there, or return None"
        )
    return faults + [
        f"routes: none {of} has route {route!r}, says {name}; leave it out, or see to that and to the data"
        for route in config.routes
        if route not in seen and not raised
    ]


def _function(field: str, target: str | Callable[..., Any], what: str) -> Callable[..., Any]:
    """The function that `target` names. DataError where there is none, or importing its module raises."""
    try:
        function = load(target)
    except ImportPathError as error:
        raise DataError(f"{field}: {error}") from error
    except Exception as error:
        raise DataError(f"{field}: importing {target!r} raised {type(error).__name__}: {error}") from error
    if not callable(function):
        raise DataError(f"{field}: {target!r} is a {type(function).__name__}; name a function {what}")
    return function


def _model_faults(config: RolloutConfig, recipe: Recipe, task: Task) -> list[str]:
    try:
        folder = model_folder(recipe.model)
    except ModelError:
        return []  # the ignitor says so
    faults = template_faults(folder) + length_faults(folder, recipe.context_length, task)
    return faults + candidate_faults(folder, config.candidates)


def template_faults(folder: Path) -> list[str]:
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return []
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and json.loads(settings.read_text()).get("chat_template"):
        return []
    return [f"model: {folder} has no chat template; add a chat_template.jinja, or take a model tuned for instructions"]


def candidate_faults(folder: Path, candidates: int) -> list[str]:
    """A fault for more candidates a token than the model has tokens."""
    try:
        there = embedded_ids(folder)
    except ModelError:
        return []  # the ignitor says so
    if there is None or candidates <= there:
        return []
    return [f"candidates: {candidates} a token were asked for, but the vocabulary of {folder} has {there}; lower it"]


def length_faults(folder: Path, context_length: int, task: Task) -> list[str]:
    """A fault for prompts whose text alone fills the context, among those with the most characters."""
    if not (folder / "tokenizer.json").is_file():
        return []  # the service counts
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    faults = []
    for split, examples in (("train", task.train), ("evaluation", task.evaluation)):
        rows = longest(examples, LONGEST_PROMPTS)
        texts = ["".join(str(message["content"]) for message in examples[row].messages) for row in rows]
        counts = [len(encoding.ids) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
        worst = max(counts, default=0)
        if worst >= context_length:
            example = examples[rows[counts.index(worst)]]
            faults.append(
                f"data: {split} prompt {example.id!r} of task {task.name!r} has {worst} tokens and leaves no room for "
                f"a response within context_length={context_length}; raise context_length, or leave such prompts out"
            )
    return faults


def name_of(target: str | Callable[..., Any]) -> str:
    return target if isinstance(target, str) else getattr(target, "__qualname__", repr(target))
