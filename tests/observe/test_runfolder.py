import json
import logging
import re

import pytest

from meshy.observe.runfolder import (
    JsonlWriter,
    RunFolder,
    RunFolderError,
    TailReader,
    read_json,
    read_jsonl,
    write_json,
)


def test_a_new_run_gets_a_folder_of_its_own(tmp_path):
    first = RunFolder.create("grpo_sync", root=tmp_path / "runs")
    second = RunFolder.create("grpo_sync", root=tmp_path / "runs")
    assert re.fullmatch(r"grpo_sync-\d{8}-\d{6}(-2)?", first.name)
    assert first.path != second.path and first.path.is_absolute()
    for folder in (first.logs, first.weights, first.timeline, first.tensorboard):
        assert folder.is_dir()
    assert first.log("trainer.0") == first.path / "logs" / "trainer.0.log"
    assert sorted(path.name for path in first.path.iterdir()) == ["logs", "tensorboard", "timeline", "weights"]


def test_run_dir_must_be_empty(tmp_path):
    (tmp_path / "mine").mkdir()
    folder = RunFolder.create("x", run_dir=tmp_path / "mine")
    folder.recipe.write_text("{}")
    with pytest.raises(RunFolderError, match=r"is not empty.*choose another --run-dir"):
        RunFolder.create("x", run_dir=tmp_path / "mine")


@pytest.mark.parametrize("place", ["file/below", "/proc/nothing/here"])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path, place):
    (tmp_path / "file").write_text("")
    for arguments in ({"run_dir": tmp_path / place}, {"root": tmp_path / place}):
        with pytest.raises(RunFolderError, match=r"--run-dir PATH"):
            RunFolder.create("x", **arguments)


def test_open_refuses_what_is_not_a_run(tmp_path):
    with pytest.raises(RunFolderError, match="there is no run folder"):
        RunFolder.open(tmp_path / "none")
    with pytest.raises(RunFolderError, match="is not a run folder"):
        RunFolder.open(tmp_path)
    run = RunFolder.create("x", root=tmp_path)
    run.topology.write_text("{}")
    assert RunFolder.open(run.path) == run
    with pytest.raises(RunFolderError, match=f"the latest is {run.path}"):
        RunFolder.open(tmp_path)


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


def test_json_files_are_whole_or_absent(tmp_path):
    assert read_json(tmp_path / "s.json") is None
    write_json(tmp_path / "s.json", {"idle_share": float("nan"), "path": tmp_path})
    assert read_json(tmp_path / "s.json") == {"idle_share": None, "path": str(tmp_path)}
    assert [path.name for path in tmp_path.iterdir()] == ["s.json"]
    (tmp_path / "s.json").write_text("{")
    with pytest.raises(RunFolderError, match="is not JSON"):
        read_json(tmp_path / "s.json")
