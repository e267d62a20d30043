"""Your own dataset: JSON lines with `messages` and `answer`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshy.data.rows import DatasetError, Row, examples_from
from meshy.data.task import Task


def jsonl(*, train: str, evaluation: str, reward: str | Callable[..., Any], seed: int = 0) -> Task:
    """A task from two files. A line is an object with `messages` (a list of `role`, `content`) and `answer`; answers
    keep their JSON type, and further keys reach the reward as `info`. Empty lines are skipped.

    seed: unused; the run's seed orders the prompts.
    DatasetError names the file and line of what is wrong.
    """
    del seed
    return Task(
        name=Path(train).stem,
        train=examples_from(_rows(Path(train)), source=train, split="train"),
        evaluation=examples_from(_rows(Path(evaluation)), source=evaluation, split="evaluation"),
        reward=reward,
    )


def _rows(path: Path) -> Iterator[Row]:
    if not path.is_file():
        raise DatasetError(f"{path}: there is no such file")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _row(line, path, number)


def _row(line: str, path: Path, number: int) -> Row:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{path}, line {number}: no JSON: {error}") from error
    if not isinstance(record, dict):
        raise DatasetError(f"{path}, line {number}: an object is due, not {type(record).__name__}")
    missing = {"messages", "answer"} - record.keys()
    if missing:
        keys = ", ".join(record)
        raise DatasetError(f"{path}, line {number}: no {' and '.join(sorted(missing))} among its keys ({keys})")
    info = {key: value for key, value in record.items() if key not in ("messages", "answer")}
    return Row(where=f"line {number}", messages=record["messages"], answer=record["answer"], info=info)
