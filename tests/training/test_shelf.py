"""Folders of weights in memory: what a killed trainer leaves behind, and what belongs to one that lives."""

import shutil
import subprocess
import sys
from pathlib import Path

from meshy.training.weights.shelf import PREFIX, Shelf, lacking_memory

OTHER = """
import sys
from pathlib import Path
from meshy.training.weights.shelf import Shelf
shelf = Shelf(Path(sys.argv[1]))
shelf.place(1).mkdir()
print("made", flush=True)
sys.stdin.read()
"""


def test_the_next_trainer_takes_away_what_a_killed_one_has_left(tmp_path: Path) -> None:
    root = tmp_path / f"{PREFIX}other"
    command = [sys.executable, "-c", OTHER, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "made\n"
        Shelf(tmp_path / f"{PREFIX}one").close()
        assert (root / "v1").is_dir()  # its trainer lives
        other.kill()
    two = Shelf(tmp_path / f"{PREFIX}two")
    assert not root.exists() and two.root.is_dir()
    again = Shelf(root)  # the same run, started again
    again.close()
    two.close()
    assert list(tmp_path.iterdir()) == []


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / f"{PREFIX}one")
    for version in (9, 10, 11):
        part = shelf.root / f".v{version}.part"
        part.mkdir()
        assert shelf.put(part) == shelf.place(version)
    assert sorted(path.name for path in shelf.root.iterdir()) == ["v10", "v11"]
    shelf.close()


def test_memory_must_hold_one_version_more_than_are_kept(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert lacking_memory(free // 4, tmp_path) == ""
    assert "MiB free, and" in lacking_memory(free // 2, tmp_path)
