"""The bound on what is in flight, and which groups are kept."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshy.rollout.filters import varied_rewards
from meshy.rollout.room import Room

CASES = json.loads((Path(__file__).parents[1] / "cases" / "golden_losses.json").read_text())["cases"]


def test_without_bounds_everything_fits():
    room = Room()
    for position in range(100):
        assert room.fits(8, 10**9)
        room.take(position, 8, 10**9)
    assert (room.used_samples, room.used_tokens) == (800, 10**11)


@pytest.mark.parametrize(("bounds", "groups"), [((8, None), 2), ((None, 350), 3), ((8, 350), 2), ((16, 350), 3)])
def test_the_tighter_of_both_bounds_counts(bounds, groups):
    room = Room(*bounds)
    for position in range(groups):
        assert room.fits(4, 100)
        room.take(position, 4, 100)
    assert not room.fits(4, 100)
    room.leave(0)
    assert room.fits(4, 100) and (room.used_samples, room.used_tokens) == (4 * (groups - 1), 100 * (groups - 1))


def test_a_group_beyond_the_bounds_is_let_in_alone():
    room = Room(4, 10)
    assert room.fits(8, 100)
    room.take(3, 8, 100)
    assert not room.fits(1, 1)
    room.leave(3)
    assert room.fits(1, 1)


@given(
    bounds=st.tuples(st.none() | st.integers(1, 20), st.none() | st.integers(1, 200)),
    moves=st.lists(st.tuples(st.booleans(), st.integers(1, 12), st.integers(1, 120)), max_size=40),
)
def test_the_bounds_hold_whatever_comes_and_goes(bounds, moves):
    room, inside = Room(*bounds), {}
    for number, (comes, samples, tokens) in enumerate(moves):
        if comes and room.fits(samples, tokens):
            room.take(number, samples, tokens)
            inside[number] = samples, tokens
        elif not comes and inside:
            leaving = min(inside)
            room.leave(leaving)
            del inside[leaving]
        used = tuple(map(sum, zip(*inside.values(), strict=True))) if inside else (0, 0)
        assert (room.used_samples, room.used_tokens) == used
        assert len(inside) <= 1 or all(
            bound is None or value <= bound for bound, value in zip(bounds, used, strict=True)
        )


@pytest.mark.parametrize("case", CASES["dapo_dynamic_sampling"], ids=lambda case: case["name"])
def test_groups_are_kept_as_in_the_golden_cases(case):
    groups = defaultdict(list)
    for reward, group in zip(case["input"]["rewards"], case["input"]["group"], strict=True):
        groups[group].append(reward)
    kept = [varied_rewards(groups[group]) for group in case["input"]["group"]]
    assert kept == case["expect"]["keep"]


def test_a_group_of_one_is_not_varied():
    assert not varied_rewards([3.0])
