"""The rule of rotation, without I/O."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshy.generation.rotation import FIRST_WAIT, LONGEST_WAIT, Rotation


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_replica_that_failed_comes_back_when_it_answers():
    clock = Clock()
    rotation = Rotation(["a", "b"], clock)
    assert rotation.failed("a", "a could not be reached") and not rotation.failed("a", "again")
    assert rotation.fit == ("b",) and rotation.is_out("a")
    clock.now += 2
    assert rotation.reasons() == ["a could not be reached (for 2 s)"] and rotation.seconds_out("a") == 2
    rotation.still_out("a", "a answered 503: starting")
    assert rotation.reasons() == ["a answered 503: starting (for 2 s)"]
    assert rotation.comes_back("a", 0) == 2 and rotation.fit == ("a", "b") and not rotation.reasons()
    clock.now += 2
    assert rotation.seconds_out("a") == 2


def test_a_stale_replica_comes_back_with_the_weights_that_are_required_by_then():
    rotation = Rotation(["a", "b"], Clock())
    assert rotation.require(4) and not rotation.require(3) and rotation.required == 4
    assert rotation.serves("a", 4, 4) and not rotation.serves("a", 3, 4) and rotation.fit == ("b",)
    rotation.require(5)
    assert rotation.comes_back("a", 4) is None
    assert rotation.reasons() == ["a serves weights v4, v5 is required (for 0 s)"]
    assert rotation.comes_back("a", 6) == 0 and rotation.fit == ("a", "b")


def test_a_replica_that_is_older_than_what_a_request_holds_already_comes_back_when_it_no_longer_is():
    rotation = Rotation(["a", "b"], Clock())
    rotation.require(4)
    assert not rotation.serves("a", 4, 6) and not rotation.serves("a", 4, 5)
    assert rotation.comes_back("a", 5) is None and rotation.comes_back("a", 6) == 0


def test_waits_grow_until_the_replica_does_what_it_is_asked():
    rotation = Rotation(["a"], Clock())
    rotation.failed("a", "a is gone")
    assert [rotation.next_wait("a") for _ in range(6)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    rotation.comes_back("a", 0)
    rotation.failed("a", "a is gone again")
    assert rotation.next_wait("a") == LONGEST_WAIT
    rotation.comes_back("a", 0)
    rotation.answered("a")
    assert rotation.next_wait("a") == FIRST_WAIT


REPLICAS = ("a", "b", "c")
replica = st.sampled_from(REPLICAS)
version = st.integers(0, 6)
events = st.one_of(
    st.tuples(st.just("require"), version),
    st.tuples(st.just("failed"), replica),
    st.tuples(st.just("loads"), replica, version),
    st.tuples(st.just("answers"), replica),
    st.tuples(st.just("is asked"), replica),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(events, max_size=40))
def test_no_replica_in_rotation_has_shown_old_weights_and_one_that_is_fit_always_comes_back(story):
    """A world of replicas that serve versions, and are asked or answer now and then."""
    rotation = Rotation(REPLICAS, Clock())
    serving = dict.fromkeys(REPLICAS, 0)
    shown: dict[str, int] = {}
    """What each replica in rotation was last seen to serve, since the last version was required."""
    for event, *arguments in story:
        if event == "require":
            if rotation.require(arguments[0]):
                shown.clear()
        elif event == "failed":
            rotation.failed(arguments[0], "failed")
        elif event == "loads":
            serving[arguments[0]] = arguments[1]
        elif event == "answers":
            (url,) = arguments
            shown[url] = serving[url]
            assert rotation.serves(url, serving[url], rotation.required) == (serving[url] >= rotation.required)
        elif rotation.is_out(arguments[0]):
            (url,) = arguments
            if rotation.comes_back(url, serving[url]) is not None:
                shown[url] = serving[url]
        assert all(shown.get(url, rotation.required) >= rotation.required for url in rotation.fit)
        assert set(rotation.fit) == {url for url in REPLICAS if not rotation.is_out(url)}
        assert len(rotation.reasons()) == len(REPLICAS) - len(rotation.fit)
    newest = max(rotation.required, *serving.values())
    for url in REPLICAS:
        if rotation.is_out(url):
            assert (rotation.comes_back(url, newest) is not None) and url in rotation.fit
