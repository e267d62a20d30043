import re

import pytest

from meshy.observe.runfolder import RunFolder, RunFolderError, read_json, write_json


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


def test_json_files_are_whole_or_absent(tmp_path):
    assert read_json(tmp_path / "s.json") is None
    write_json(tmp_path / "s.json", {"idle_share": float("nan"), "path": tmp_path})
    assert read_json(tmp_path / "s.json") == {"idle_share": None, "path": str(tmp_path)}
    assert [path.name for path in tmp_path.iterdir()] == ["s.json"]
    (tmp_path / "s.json").write_text("{")
    with pytest.raises(RunFolderError, match="is not JSON"):
        read_json(tmp_path / "s.json")
