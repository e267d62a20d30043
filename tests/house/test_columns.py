"""Roles that score meet the others in the recipe alone: nobody else names one of their columns, or the room."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_args

import pytest

from meshy.recipe import Recipe, ServiceConfig
from meshy.rollout.config import RolloutConfig
from meshy.scoring.config import Score
from meshy.settings import load_recipe

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "meshy"
OTHERS = ("inference", "rollout", "training", "ignitor")
SCORING = "meshy.scoring"


def scoring_configs() -> Iterator[ServiceConfig]:
    """One of each role that scores; of those that can write this or that, one for each."""
    for file in sorted((PACKAGE / "scoring").glob("*config.py")):
        module = importlib.import_module(f"{SCORING}.{file.stem}")
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, ServiceConfig) and cls.service:
                needed = {f.name: "any" for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
                scores = [f.name for f in fields(cls) if f.name == "scores"]
                for score in get_args(Score) if scores else ("",):
                    yield cls(**needed, **dict.fromkeys(scores, (score,)))


def written(config: ServiceConfig, recipe: Recipe) -> set[str]:
    return {column.name for produces in config.produces(recipe) for column in produces.columns}


def scoring_columns() -> set[str]:
    recipe = load_recipe(ROOT / "recipes/ppo.py", {}, gpus=4)
    scored = {column for config in scoring_configs() for column in written(config, recipe)}
    return scored - written(RolloutConfig(candidates=1, greedy_baseline=True), recipe)


def mentions(source: str, columns: set[str]) -> list[str]:
    """Imports of the scoring roles, and texts with a column's name; `values` and the like, which are words too, where
    they are all of the text."""
    whole = {column for column in columns if "_" not in column}
    inside = re.compile("|".join([re.escape(SCORING), *(rf"\b{name}\b" for name in sorted(columns - whole))]))
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                texts = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names):
                texts = [f"{module}.{alias.name}" for alias in names]
            case ast.Constant(value=str(text)):
                texts = [text]
            case _:
                continue
        found += [f"{node.lineno}: {text!r:.100}" for text in texts if text in whole or inside.search(text)]
    return found


COLUMNS = scoring_columns()


def test_the_columns_of_the_scoring_roles_are_known() -> None:
    assert {"teacher_logprobs", "teacher_topk_ids", "teacher_vocab_logprobs", "ref_logprobs", "values"} <= COLUMNS
    assert not COLUMNS & {"student_topk_ids", "reward", "tokens"}


@pytest.mark.parametrize("room", OTHERS)
def test_nobody_else_names_a_column_of_the_scoring_roles(room: str) -> None:
    files = sorted((PACKAGE / room).rglob("*.py"))
    assert files
    assert not [f"{file.relative_to(PACKAGE)}:{at}" for file in files for at in mentions(file.read_text(), COLUMNS)]


@pytest.mark.parametrize(
    "source",
    [
        "import meshy.scoring.config",
        "from meshy import scoring",
        "from meshy.scoring.config import TeacherConfig",
        "def f():\n    from meshy.scoring import config",
        "load('meshy.scoring.teacher:TeacherService')",
        "rows['teacher_logprobs']",
        "f'row {uid} has no ref_logprobs'",
        "data.get('values')",
    ],
)
def test_a_mention_is_found(source: str) -> None:
    assert mentions(source, COLUMNS)


def test_what_only_looks_like_one_is_none() -> None:
    plain = "values = [v for v in rows.values()]\nraise ValueError('two values, or logprobs, of ref_logprobs_total')"
    assert not mentions(f"from meshy.learning import rewards\n{plain}", COLUMNS)
