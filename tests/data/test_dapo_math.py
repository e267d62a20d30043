"""DAPO-Math-17k's shape: every problem many times over, its answer in a struct."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from meshy.data.dapo_math import dapo_math
from meshy.data.rows import DatasetError
from meshy.importing import load
from meshy.rewards.sample import RewardSample

Record = dict[str, Any]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def problem(number: int, answer: str | None) -> Record:
    text = f"Solve problem {number}. The last line of your response should be of the form Answer: $Answer."
    return {"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": answer, "style": "rule"}}


def folder(tmp_path: Path, records: list[Record]) -> str:
    there = tmp_path / "dapo"
    there.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), there / "train.parquet")
    return str(there)


PROBLEMS = [problem(0, "34"), problem(1, "-7"), problem(2, "113")]


def test_each_problem_is_taken_once_and_nothing_else_is_filtered(tmp_path: Path) -> None:
    path = folder(tmp_path, PROBLEMS * 3)
    task = dapo_math(path=path, evaluation_size=1)
    assert sorted(example.answer for example in (*task.train, *task.evaluation)) == ["-7", "113", "34"]
    assert len(task.evaluation) == 1
    for example in task.train:  # prompts as published
        assert [dict(message) for message in example.messages] in [record["prompt"] for record in PROBLEMS]
    drawn = {dapo_math(path=path, evaluation_size=1, evaluation_seed=i).evaluation[0].answer for i in range(8)}
    assert len(drawn) > 1
    assert [example.answer for example in dapo_math(path=path, evaluation_size=0).train] == ["34", "-7", "113"]


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("So it is.\nAnswer: 34", 1.0),
        ("Answer: $34$", 1.0),
        ("Answer: 35", 0.0),
        ("First 34, then no.\nAnswer: 36", 0.0),
    ],
)
def test_its_reward_reads_the_last_line(tmp_path: Path, response: str, right: float) -> None:
    task = dapo_math(path=folder(tmp_path, PROBLEMS), evaluation_size=0)
    example = task.train[0]
    score = load(task.reward)(RewardSample(prompt=example.messages, response=response, answer=example.answer))
    assert score == right


@pytest.mark.parametrize(
    ("records", "size", "message"),
    [
        (PROBLEMS, 3, "evaluation_size is 3, but there are 3 problems"),
        ([{"question": "How?"}], 0, "no column prompt, reward_model among question"),
        ([PROBLEMS[0], problem(1, None)], 0, "row 1: .*answer"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path: Path, records: list[Record], size: int, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        dapo_math(path=folder(tmp_path, records), evaluation_size=size)
