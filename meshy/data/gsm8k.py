"""GSM8K: school mathematics in words, with a number as the answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from meshy.data.rows import DatasetError, Row, examples_from
from meshy.data.task import Task

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def gsm8k(
    *,
    seed: int = 0,
    path: str = "openai/gsm8k",
    instruction: str = INSTRUCTION,
    evaluation_size: int | None = None,
) -> Task:
    """The task, from the Hugging Face hub or from a local folder with `train` and `test` files (parquet or jsonl).

    seed: unused; the run's seed orders the prompts. instruction: stands after each question; may be empty.
    evaluation_size: the first so many test rows; None takes all 1,319.
    DatasetError for a missing split or column, or an answer without a number behind `####`.
    """
    del seed
    splits = _load(path)
    test = splits["test"]
    if evaluation_size is not None:
        test = test.select(range(min(evaluation_size, len(test))))
    return Task(
        name="gsm8k",
        train=examples_from(_rows(splits["train"], path, instruction), source=path, split="train"),
        evaluation=examples_from(_rows(test, path, instruction), source=path, split="evaluation"),
        reward="meshy.rewards.gsm8k:reward",
    )


def _load(path: str) -> Any:
    """The dataset's splits, each with the columns `question` and `answer`."""
    from datasets import load_dataset  # costs a second: only where it is needed

    local = Path(path).is_dir()
    splits = load_dataset(path) if local else load_dataset(path, "main")
    for split in ("train", "test"):
        if split not in splits:
            raise DatasetError(f"{path}: there is no split {split!r} among {', '.join(splits)}")
        missing = {"question", "answer"} - set(splits[split].column_names)
        if missing:
            there = ", ".join(splits[split].column_names)
            raise DatasetError(f"{path}, {split}: no column {', '.join(sorted(missing))} among {there}")
    return splits


def _rows(records: Iterable[Mapping[str, Any]], source: str, instruction: str) -> Iterator[Row]:
    for index, record in enumerate(records):
        question, solution = record["question"], record["answer"]
        prompt = f"{question} {instruction}".rstrip() if isinstance(question, str) else question
        yield Row(
            where=f"row {index}",
            messages=[{"role": "user", "content": prompt}],
            answer=_number(solution, source, index),
            info={"solution": solution},
        )


def _number(solution: str | None, source: str, index: int) -> str | None:
    """The gold number behind the `####` of a worked solution, without thousands separators."""
    if not solution:
        return solution
    _, marker, number = solution.rpartition("####")
    if not marker:
        raise DatasetError(f"{source}, row {index}: no `####` before a final number in {solution[-200:]!r}")
    return number.strip().replace(",", "")
