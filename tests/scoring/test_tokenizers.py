"""Which tokenizers are one, and which maps between two are."""

import json
from pathlib import Path

import pytest

from meshy.scoring.tokenizers import TokenMapError, first_difference, load_token_map, token_map_faults, tokens_by_id

DEMO = Path(__file__).parents[2] / "recipes" / "demo_model"


def test_the_first_id_that_means_something_else_is_found():
    assert first_difference({0: "a", 1: "b"}, {0: "a", 1: "b"}) is None
    assert first_difference({0: "a", 1: "b", 2: "c"}, {0: "a", 1: "x", 2: "y"}) == (1, "b", "x")
    assert first_difference({0: "a"}, {0: "a", 1: "b"}) == (1, None, "b")
    assert first_difference({0: "a", 5: "z"}, {0: "a"}) == (5, "z", None)


def test_a_tokenizers_own_and_added_tokens_are_all_seen():
    tokens = tokens_by_id(DEMO)
    assert len(tokens) == 264
    assert tokens[0] == "<|pad|>"


def swap(policy: Path, own: Path) -> list[int]:
    assert policy == own
    return [1, 0]


def fails(policy: Path, own: Path) -> list[int]:
    raise RuntimeError("no such luck")


def test_a_map_comes_from_a_file_or_a_function(tmp_path):
    file = tmp_path / "map.json"
    file.write_text(json.dumps([2, -1, 0]))
    assert load_token_map(str(file), DEMO, DEMO) == [2, -1, 0]
    assert load_token_map(swap, DEMO, DEMO) == [1, 0]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("no_such_file.json", "cannot be read"),
        ("no.such.module:map", "there is no module 'no'"),
        (fails, "raised RuntimeError: no such luck"),
        (lambda policy, own: {"a": 1}, "gives no list"),
        (lambda policy, own: [1, "2"], "gives no list"),
        (lambda policy, own: [True], "gives no list"),
    ],
)
def test_what_is_no_map_is_said(source, told):
    with pytest.raises(TokenMapError, match=told):
        load_token_map(source, DEMO, DEMO)


def test_a_map_covers_the_policys_vocabulary_and_stays_in_its_own():
    assert token_map_faults([0, 1, -1], 3, 2) == []
    assert "2 entries for the 3 ids" in token_map_faults([0, 1], 3, 2)[0]
    assert "entry 1 is 2, but this model's ids go from 0 to 1" in token_map_faults([0, 2, 1], 3, 2)[0]
    assert "entry 0 is -2" in token_map_faults([-2, 0, 1], 3, 2)[0]
    assert "entries 0 and 2 are both 1" in token_map_faults([1, 0, 1], 3, 2)[0]
    assert "names no token at all" in token_map_faults([-1, -1, -1], 3, 2)[0]
