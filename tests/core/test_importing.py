"""Import paths: what loads, what is refused, what can be named."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshy.importing import ImportPathError, load, path_of


def test_modules_and_files_load(tmp_path: Path) -> None:
    (tmp_path / "rewards_of_mine.py").write_text("class A:\n    @staticmethod\n    def f(): return 7\n")
    assert load("os.path:join")("a", "b") == "a/b"
    assert load(f"{tmp_path}/rewards_of_mine.py:A.f")() == 7
    function = load(f"{tmp_path}/rewards_of_mine.py:A")
    assert load(path_of(function)) is function
    assert load(len) is len


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("os.path", "is no import path"),
        ("no.such.module:f", "there is no module 'no'"),
        ("os.path:jion", "did you mean 'join'?"),
        ("/nowhere/x.py:f", "there is no file /nowhere/x.py"),
    ],
)
def test_a_path_that_leads_nowhere_says_which_half_is_wrong(path: str, said: str) -> None:
    with pytest.raises(ImportPathError, match=said.replace("?", r"\?")):
        load(path)


def test_an_error_inside_the_module_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import not_there_at_all")
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        load(f"{tmp_path}/broken.py:f")


def test_what_has_no_name_cannot_travel() -> None:
    with pytest.raises(ImportPathError, match="top level"):
        path_of(lambda: None)
