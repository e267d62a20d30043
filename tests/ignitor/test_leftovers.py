"""What killed services leave in shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshy.ignitor import leftovers


def test_only_folders_of_this_run_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path)
    for name in ("meshy-weights-one", "meshy-weights-two", "others-one"):
        (tmp_path / name / "v1").mkdir(parents=True)
    leftovers.remove_leftovers("one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["meshy-weights-two", "others-one"]
