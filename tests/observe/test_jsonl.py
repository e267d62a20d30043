import json
import logging

import pytest

from meshy.observe.jsonl import JsonlWriter, TailReader, read_jsonl


def test_jsonl_is_valid_json_whatever_is_written(tmp_path, caplog):
    numpy = pytest.importorskip("numpy")
    with JsonlWriter(tmp_path / "m.jsonl") as writer, caplog.at_level(logging.WARNING):
        for _ in range(2):
            writer.write(
                {"loss": float("nan"), "a": {"b": [1.0, float("inf")]}, "n": numpy.float32(0.5), "v": numpy.arange(2)}
            )
    rows = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert rows == [{"loss": None, "a": {"b": [1.0, None]}, "n": 0.5, "v": [0, 1]}] * 2
    assert [record.getMessage().split(" is ")[0] for record in caplog.records] == ["m.jsonl: loss", "m.jsonl: a.b"]


def test_a_numpy_nan_is_null_too(tmp_path):
    numpy = pytest.importorskip("numpy")
    with JsonlWriter(tmp_path / "m.jsonl") as writer:
        writer.write({"x": numpy.float64("nan"), "y": numpy.float32("nan")})
    assert read_jsonl(tmp_path / "m.jsonl") == [{"x": None, "y": None}]


def test_a_crash_in_the_middle_of_a_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "re')
    assert read_jsonl(path) == [{"step": 1}]
    with JsonlWriter(path) as writer:
        writer.write({"step": 2})
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]
    path.write_bytes(b"x" * 200_000)  # no newline at all, longer than one block
    JsonlWriter(path).close()
    assert path.read_bytes() == b""


def test_tail_follows(tmp_path, caplog):
    path = tmp_path / "m.jsonl"
    tail = TailReader(path)
    assert tail.read() == []
    with path.open("ab", buffering=0) as file:
        file.write(b'{"step": 1}\n{"st')
        assert tail.read() == [{"step": 1}]
        assert tail.read() == []
        file.write(b'ep": 2}\nbroken\n{"step": 3}\n')
        assert tail.read() == [{"step": 2}, {"step": 3}]
    assert "line 3 is not JSON" in caplog.text
    path.write_bytes(b'{"step": 9}\n')
    assert tail.read() == [{"step": 9}]
