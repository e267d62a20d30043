"""Datasets from files: GSM8K's shape, JSON lines, and rows that are refused."""

import json
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from meshy.data import Example, Task
from meshy.data.gsm8k import gsm8k
from meshy.data.jsonl import jsonl
from meshy.data.rows import DatasetError

CLIPS = {"question": "How many clips?", "answer": "She sold 48/2 = <<48/2=24>>24.\n#### 72"}
MILES = {"question": "How far?", "answer": "Far.\n#### 1,234"}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path, rows):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def folder(tmp_path, train, test, kind="jsonl"):
    there = tmp_path / "gsm8k"
    there.mkdir()
    write(there / f"train.{kind}", train)
    write(there / f"test.{kind}", test)
    return str(there)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_gsm8k_from_a_folder(tmp_path, kind):
    task = gsm8k(path=folder(tmp_path, [CLIPS, MILES], [MILES, CLIPS], kind), evaluation_size=1)
    assert [example.answer for example in task.train] == ["72", "1234"]
    assert [example.id for example in task.train] == ["train-0", "train-1"]
    (question,) = task.train[0].messages
    assert question["role"] == "user"
    assert question["content"].startswith("How many clips? Let's") and "####" in question["content"]
    assert [example.answer for example in task.evaluation] == ["1234"]
    assert task.train[0].info["solution"] == CLIPS["answer"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"question": "How?", "answer": None}, "row 1: the answer is None"),
        ({"question": "How?", "answer": ""}, "row 1: the answer is ''"),
        ({"question": "How?", "answer": "So\n####"}, "row 1: the answer is ''"),
        ({"question": "How?", "answer": "72"}, "row 1: no `####`"),
        ({"question": None, "answer": "#### 72"}, "1 of 3 train rows .* row 1: the content of a message is no text"),
    ],
)
def test_gsm8k_rows_that_cannot_be_graded_are_refused(tmp_path, bad, message):
    with pytest.raises(DatasetError, match=message):
        gsm8k(path=folder(tmp_path, [CLIPS, bad, MILES], [CLIPS]))


def test_gsm8k_with_another_column_is_refused(tmp_path):
    with pytest.raises(DatasetError, match="train: no column answer among question, solution"):
        gsm8k(path=folder(tmp_path, *[[{"question": "How?", "solution": "1"}]] * 2))


def chat(answer, messages=None, **more):
    return {"messages": messages or [{"role": "user", "content": "2+2"}], "answer": answer, **more}


def task_of(tmp_path, rows, evaluation=None):
    train = write(tmp_path / "train.jsonl", rows)
    return jsonl(train=train, evaluation=write(tmp_path / "test.jsonl", evaluation or [chat(0)]), reward="a:b")


def test_json_lines_keep_their_answers_types_and_further_keys(tmp_path):
    task = task_of(tmp_path, [chat(4), chat("four", level=2)])
    assert [example.answer for example in task.train] == [4, "four"]
    assert task.train[1].info == {"level": 2} and task.name == "train"


def test_a_null_answer_is_refused_with_its_line(tmp_path):
    with pytest.raises(DatasetError, match=r"train.jsonl, line 3: the answer is None"):
        task_of(tmp_path, [chat(4), chat("4"), chat(None)])


def test_malformed_messages_are_counted_and_the_first_is_shown(tmp_path):
    rows = [chat(1), chat(2, "2+2"), chat(3), chat(4, [{"role": "wizard", "content": "2+2"}]), chat(5, ["2+2"])]
    with pytest.raises(DatasetError, match=r"3 of 5 train rows .* line 2: a list of messages is due, not str: '2\+2'"):
        task_of(tmp_path, rows)
    with pytest.raises(DatasetError, match=r"1 of 1 .* line 1: unknown role 'wizard'"):
        task_of(tmp_path, rows[3:4])


def test_files_that_are_not_there_empty_or_no_json_are_refused(tmp_path):
    with pytest.raises(DatasetError, match="train dataset is empty"):
        task_of(tmp_path, [])
    with pytest.raises(DatasetError, match="no such file"):
        jsonl(train=str(tmp_path / "none.jsonl"), evaluation="x", reward="a:b")
    (tmp_path / "broken.jsonl").write_text('{"messages": [\n')
    with pytest.raises(DatasetError, match=r"broken.jsonl, line 1: no JSON"):
        jsonl(train=str(tmp_path / "broken.jsonl"), evaluation="x", reward="a:b")
    with pytest.raises(DatasetError, match=r"line 1: no answer among its keys \(messages\)"):
        task_of(tmp_path, [{"messages": []}])


def test_ids_are_unique_within_a_task():
    def example(name):
        return Example(id=name, messages=({"role": "user", "content": name},), answer=1)

    with pytest.raises(ValueError, match="train row 1 and evaluation row 0 both have the id 'b'"):
        Task(name="t", train=[example("a"), example("b")], evaluation=[example("b")], reward="a:b")


def test_the_room_imports_no_torch():
    rooms = "meshy.data.addition, meshy.data.gsm8k, meshy.data.jsonl, meshy.data.order, meshy.rewards.pool"
    rooms += ", meshy.rewards.gsm8k, meshy.rewards.math"
    code = f"import sys, {rooms}; assert not {{'torch', 'datasets', 'sympy', 'zmq'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
