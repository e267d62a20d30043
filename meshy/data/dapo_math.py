"""DAPO-Math-17k (arXiv 2503.14476): competition mathematics with whole numbers as answers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from meshy.data.rows import DatasetError, Row, examples_from
from meshy.data.task import Task


def dapo_math(
    *,
    seed: int = 0,
    path: str = "BytedTsinghua-SIA/DAPO-Math-17k",
    evaluation_size: int = 128,
    evaluation_seed: int = 0,
) -> Task:
    """The task, from the Hugging Face hub or from a local folder with a `train` file (parquet or jsonl).

    The published files hold every problem a hundred times over; each is taken once, and nothing else is filtered. The
    prompts are as published: they ask for a last line `Answer: ...`. There is no test split: `evaluation_size` problems
    are held out, drawn by `evaluation_seed`. seed: unused; the run's seed orders the prompts.
    DatasetError for a missing column, or a problem without an answer.
    """
    del seed
    problems = list(_problems(_load(path)))
    if not 0 <= evaluation_size < len(problems):
        raise DatasetError(
            f"{path}: evaluation_size is {evaluation_size}, but there are {len(problems)} problems; leave some to train"
        )
    held_out = set(random.Random(evaluation_seed).sample(range(len(problems)), evaluation_size))
    train = (row for index, row in enumerate(problems) if index not in held_out)
    evaluation = (row for index, row in enumerate(problems) if index in held_out)
    return Task(
        name="dapo_math",
        train=examples_from(train, source=path, split="train"),
        evaluation=examples_from(evaluation, source=path, split="evaluation") if held_out else (),
        reward="meshy.rewards.math:reward",
    )


def _load(path: str) -> Any:
    from datasets import load_dataset  # costs a second: only where it is needed

    rows = load_dataset(path, split="train")
    missing = {"prompt", "reward_model"} - set(rows.column_names)
    if missing:
        there = ", ".join(rows.column_names)
        raise DatasetError(f"{path}, train: no column {', '.join(sorted(missing))} among {there}")
    tables = rows.select_columns(["prompt", "reward_model"]).with_format("arrow").iter(batch_size=10_000)
    return (record for table in tables for record in table.to_pylist())  # ten times faster than row by row


def _problems(records: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    seen: set[str] = set()
    for index, record in enumerate(records):
        prompt = record["prompt"]
        if (key := repr(prompt)) in seen:
            continue
        seen.add(key)
        reward = record["reward_model"]
        answer = reward.get("ground_truth") if isinstance(reward, Mapping) else None
        yield Row(where=f"row {index}", messages=prompt, answer=answer)
