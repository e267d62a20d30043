"""Slots that decode without a model, on cases worked by hand. A step takes 1 s."""

from __future__ import annotations

import pytest

from scripts.bench.pace.decoding import Decoding, Job


def started(slots: int, **tokens: int) -> Decoding:
    """With these jobs, submitted at 0 in this order."""
    decoding = Decoding(slots, 1.0, 0.0)
    for rid, count in tokens.items():
        decoding.submit(Job(rid, count), 0.0)
    return decoding


def ended(decoding: Decoding, now: float) -> dict[str, int]:
    return {job.rid: job.written for job in decoding.advance(now)}


def test_a_response_takes_a_slot_for_as_many_steps_as_it_has_tokens() -> None:
    """One slot: 3 tokens to 3, then 2 to 5."""
    decoding = started(1, a=3, b=2)
    assert (decoding.running, decoding.waiting) == (1, 1)
    assert decoding.next_end() == 3
    assert ended(decoding, 2.9) == {}
    assert ended(decoding, 3.0) == {"a": 3}
    assert decoding.next_end() == 5
    assert ended(decoding, 5.0) == {"b": 2}
    assert decoding.next_end() is None
    assert decoding.tokens == 5


def test_a_slot_is_taken_at_once_however_late_one_looks() -> None:
    """Nobody looks before 10: a ended at 3, b ran from 3 to 5, c from 5 to 9."""
    decoding = started(1, a=3, b=2, c=4)
    assert list(ended(decoding, 10.0)) == ["a", "b", "c"]


def test_the_next_in_line_does_not_begin_before_it_came() -> None:
    """b comes at 4.5, when a has ended at 3 and nobody has looked: nothing runs, so a step begins with it, to 6.5."""
    decoding = started(1, a=3)
    decoding.submit(Job("b", 2), 4.5)
    assert decoding.next_end() == 6.5


def test_a_request_within_a_step_waits_for_the_next() -> None:
    """b comes at 0.5, while a's first step goes on to 1: it ends at 3."""
    decoding = started(2, a=5)
    decoding.submit(Job("b", 2), 0.5)
    assert decoding.next_end() == 3


def test_weights_take_effect_between_two_steps() -> None:
    """Version 1 comes at 1.5, within the second step: tokens 0 and 1 are version 0's, 2 and 3 version 1's. Version 2
    comes at 4, a boundary, and token 4 is its own. b, which starts at 5, is all of version 2."""
    decoding = started(1, a=5, b=2)
    decoding.set_version(1, 1.5)
    decoding.set_version(2, 4.0)
    a, b = decoding.advance(7.0)
    assert a.spans == [(0, 0, 2), (1, 2, 4), (2, 4, 5)]
    assert b.spans == [(2, 0, 2)]


def test_two_versions_within_a_step_leave_no_empty_span() -> None:
    decoding = started(1, a=3)
    decoding.set_version(1, 1.2)
    decoding.set_version(2, 1.4)
    assert decoding.advance(3.0)[0].spans == [(0, 0, 2), (2, 2, 3)]


def test_a_request_after_a_version_is_of_that_version() -> None:
    """Also where both come at the same moment, to idle slots, or to slots that were left within a step."""
    decoding = started(1, a=2)
    decoding.set_version(1, 2.0)
    decoding.submit(Job("b", 1), 2.0)
    decoding.set_version(2, 3.7)
    decoding.submit(Job("c", 1), 3.7)
    assert [job.spans for job in decoding.advance(9.0)] == [[(0, 0, 2)], [(1, 0, 1)], [(2, 0, 1)]]


def test_time_stands_still_in_a_pause() -> None:
    """Paused from 1.5 to 11.5 a ends at 13 instead of 3; what was written in between is nothing, and the version that
    came meanwhile writes what comes after the step that was under way."""
    decoding = started(1, a=3)
    decoding.pause(1.5)
    assert decoding.next_end() is None
    decoding.set_version(1, 8.0)
    assert ended(decoding, 11.0) == {}
    decoding.submit(Job("b", 1), 11.0)
    decoding.resume(11.5)
    assert decoding.next_end() == 13
    a, b = decoding.advance(14.0)
    assert a.spans == [(0, 0, 2), (1, 2, 3)]
    assert b.spans == [(1, 0, 1)]


def test_an_abort_gives_what_is_written_and_frees_the_slot() -> None:
    """a is aborted at 2.5, with two tokens; b begins at the next boundary, 3, and ends at 5."""
    decoding = started(1, a=9, b=2, c=4)
    assert decoding.abort({"a", "c", "unknown"}, 2.5) == 2
    a, c = decoding.advance(2.5)
    assert (a.rid, a.written, a.aborted, a.spans) == ("a", 2, True, [(0, 0, 2)])
    assert (c.rid, c.written, c.aborted, c.spans) == ("c", 0, True, [])
    assert decoding.next_end() == 5
    assert ended(decoding, 5.0) == {"b": 2}
    assert (decoding.running, decoding.waiting) == (0, 0)


def test_everything_is_aborted() -> None:
    decoding = started(1, a=9, b=2)
    assert decoding.abort(None, 1.0) == 2
    assert ended(decoding, 1.0) == {"a": 1, "b": 0}
    assert decoding.next_end() is None


def test_a_name_that_is_under_way_is_refused() -> None:
    decoding = started(1, a=3)
    with pytest.raises(ValueError, match="under way"):
        decoding.submit(Job("a", 1), 1.0)
    decoding.submit(Job("a", 1), 3.0)  # it has ended by now
