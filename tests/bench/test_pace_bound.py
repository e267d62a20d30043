"""The simulation that bounds each pace setting, on cases worked by hand. A decode step takes 1 s throughout."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from scripts.bench.pace.bound import Outcome, Setting, simulate
from scripts.bench.pace.lengths import SEEDS, lengths_of_run, response_length


def play(lengths: Sequence[int], **fields: Any) -> Outcome:
    """Two slots, batches of two and a second of training per token, unless fields say otherwise."""
    defaults: dict[str, Any] = {"batches": 2, "batch_size": 2, "slots": 2, "token_seconds": 1.0}
    return simulate(Setting(**{**defaults, **fields}), lengths.__getitem__)


def moments(outcome: Outcome) -> list[tuple[float | None, ...]]:
    return [(sample.started, sample.finished, sample.trained) for sample in outcome.samples]


def test_one_slot_takes_one_response_after_the_other() -> None:
    """3 and 2 tokens in one slot are written at 3 and 5; 5 tokens are then trained at half a second each, to 7.5."""
    outcome = play([3, 2], batches=1, slots=1, token_seconds=0.5)
    assert moments(outcome) == [(0, 3, 5), (3, 5, 5)]
    assert outcome.seconds == 7.5
    assert outcome.samples_per_second == 2 / 7.5
    assert outcome.busy_slots == 5 / 7.5
    assert outcome.busy_trainer == 2.5 / 7.5


def test_lock_step_waits_for_the_longest_and_for_the_training() -> None:
    """Batch 0 is complete at 3 and trained to 3 + 4 = 7; only then batch 1 starts: complete at 9, trained to 13."""
    outcome = play([1, 3, 2, 2])
    assert moments(outcome) == [(0, 1, 3), (0, 3, 3), (7, 9, 9), (7, 9, 9)]
    assert outcome.published == [7, 13]
    assert outcome.ages == [0, 0, 0, 0]
    assert outcome.most_live == 2


def test_a_window_of_two_generates_one_batch_ahead() -> None:
    """Batch 1 follows in the slots as they become free, at 1 and 3, and is complete at 5, while batch 0 is trained from
    3 to 7; so it is trained from 7 to 11, one version after the one that wrote it."""
    outcome = play([1, 3, 2, 2], window=2)
    assert moments(outcome) == [(0, 1, 3), (0, 3, 3), (1, 3, 7), (3, 5, 7)]
    assert outcome.published == [7, 11]
    assert outcome.ages == [0, 0, 1, 1]
    assert outcome.most_live == 4


def test_a_window_trains_batches_in_their_order() -> None:
    """Batch 1 is complete at 2, but batch 0 only at 8, since its second response is long: trained 8 to 17 and 17 to 19.
    Batch 2 may start when batch 0 is retired, at 17, by version 1, and is trained at 19, by version 2."""
    outcome = play([1, 8, 1, 1, 1, 1], window=2, batches=3, slots=4)
    assert moments(outcome) == [(0, 1, 8), (0, 8, 8), (0, 1, 17), (0, 1, 17), (17, 18, 19), (17, 18, 19)]
    assert outcome.published == [17, 19, 21]
    assert outcome.ages == [0, 0, 1, 1, 1, 1]


def test_mini_batches_stream_within_the_batch() -> None:
    """The second response, of one token, is there at 1 and trained from 1 to 2; the first comes at 3 and is trained to
    6, when the whole batch is published and batch 1 starts."""
    outcome = play([3, 1, 1, 1], stream=True, mini_batches=2)
    assert moments(outcome) == [(0, 3, 3), (0, 1, 1), (6, 7, 7), (6, 7, 8)]
    assert outcome.published == [6, 9]


def test_mini_batches_without_streaming_wait_for_the_batch() -> None:
    """As above, but nothing is trained before 3."""
    outcome = play([3, 1, 1, 1], mini_batches=2)
    assert moments(outcome) == [(0, 3, 3), (0, 1, 3), (7, 8, 8), (7, 8, 8)]
    assert outcome.published == [7, 10]


def test_none_trains_what_is_complete() -> None:
    """Three batches may be under way: all six samples. The long one keeps a slot to 10; the others pass through the
    other, a second each. 1 and 2 are complete at 2 and trained to 4; 3 and 4 are there by then and trained to 6. 5,
    which started at 4, of version 1, waits for the long one, of version 0; with it, it is trained from 10 to 21."""
    outcome = play([10, 1, 1, 1, 1, 1], window=None, max_staleness=2, batches=3)
    assert moments(outcome) == [(0, 10, 10), (0, 1, 2), (1, 2, 2), (2, 3, 4), (3, 4, 4), (4, 5, 10)]
    assert outcome.published == [4, 6, 21]
    assert outcome.ages == [2, 0, 0, 1, 1, 1]
    assert outcome.dropped == 0


def test_none_starts_what_is_retired() -> None:
    """As above with max_staleness 1: four samples may be under way, so 4 and 5 start only when 1 and 2 are retired, at
    4. The long one is too old by 10, and 6 replaces it: from 10 to 13, trained with 5 from 13 to 17."""
    outcome = play([10, 1, 1, 1, 1, 1, 3], window=None, max_staleness=1, batches=3)
    assert moments(outcome)[3:] == [(2, 3, 5), (4, 5, 5), (5, 6, 13), (10, 13, 13)]
    assert outcome.published == [4, 7, 17]
    assert outcome.samples[0].trained is None
    assert outcome.dropped == 1
    assert outcome.most_live == 4


def test_a_dropped_group_is_retired_and_replaced_at_once() -> None:
    """Batches of one; two samples may be under way. 0 (five tokens) and 1 start at 0. 1 is complete at 1 and trained to
    2: version 1, and 2 starts; it is trained from 3 to 4: version 2, and 3 starts. At 5 both 3 and the long one are
    complete, but that is of version 0, two versions ago: it is dropped, and its replacement, number 4, starts at once
    and is complete at 7. 3 is trained from 5 to 6, number 4 from 7 to 9, one version after its own."""
    outcome = play([5, 1, 1, 1, 2], window=None, max_staleness=1, batches=4, batch_size=1)
    assert moments(outcome) == [(0, 5, None), (0, 1, 1), (2, 3, 3), (4, 5, 5), (5, 7, 7)]
    assert outcome.published == [2, 4, 6, 9]
    assert outcome.dropped == 1
    assert [sample.age for sample in outcome.samples] == [None, 0, 0, 0, 1]
    assert outcome.most_live == 2


def test_groups_are_trained_whole() -> None:
    """Groups (1, 4) and (2, 2) start at 0 in four slots. With mini-batches of one group, the second group is complete
    first, at 2, and trained to 6; the first, complete at 4, is trained from 6 to 11."""
    outcome = play([1, 4, 2, 2], batches=1, batch_size=4, group_size=2, slots=4, stream=True, mini_batches=2)
    assert moments(outcome) == [(0, 1, 6), (0, 4, 6), (0, 2, 2), (0, 2, 2)]
    assert outcome.seconds == 11


def test_members_of_a_group_may_differ_in_age() -> None:
    """One slot and batches of one group of two. Group 0 is complete at 2 and trained to 4: version 1. The members of
    group 1 start at 2, by version 0, and at 5, by version 1; the group is trained at 6, by version 1."""
    outcome = play([1, 1, 3, 1], group_size=2, slots=1, window=None, max_staleness=1)
    assert moments(outcome) == [(0, 1, 2), (1, 2, 2), (2, 5, 6), (5, 6, 6)]
    assert outcome.ages == [0, 0, 1, 0]
    assert outcome.seconds == 10


def test_a_request_goes_to_the_engine_with_the_fewest() -> None:
    """Two engines of one slot; 0 goes to the first, 1 to the second, 2 behind 0, 3 behind 1. The second engine is free
    at 2 and stays so, while 2 waits behind 0 until 6."""
    outcome = play([6, 1, 1, 1], batches=1, batch_size=4, engines=2, slots=1, token_seconds=0.0)
    assert [(s.engine, s.started) for s in outcome.samples] == [(0, 0), (1, 0), (0, 6), (1, 1)]
    assert outcome.seconds == 7


def test_in_one_line_whichever_engine_is_free_takes_the_next() -> None:
    """As above, but each engine is given one request at a time: the second engine takes 1, 2 and 3 in turn."""
    outcome = play(
        [6, 1, 1, 1], batches=1, batch_size=4, engines=2, slots=1, token_seconds=0.0, max_in_flight_per_engine=1
    )
    assert [(s.engine, s.started) for s in outcome.samples] == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert outcome.seconds == 6


def test_max_in_flight_holds_groups_back() -> None:
    """Four slots, but two samples at once: 0 and 1 at 0, then one for each that ends, at 1 and at 2."""
    outcome = play([1, 2, 3, 1], batches=1, batch_size=4, slots=4, token_seconds=0.0, max_in_flight=2)
    assert [s.started for s in outcome.samples] == [0, 0, 1, 2]
    assert outcome.seconds == 4


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"window": None}, "max_staleness"),
        ({"window": 0}, "lets nothing start"),
        ({"window": 3, "max_staleness": 1}, "below window - 1"),
        ({"batch_size": 6, "group_size": 4}, "does not divide"),
        ({"batch_size": 8, "group_size": 4, "mini_batches": 4}, "mini-batches"),
        ({"group_size": 2, "max_in_flight": 1}, "no room"),
    ],
)
def test_settings_that_cannot_be(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        play([1] * 8, **fields)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("window", [1, 2, 3, None])
def test_what_holds_for_every_run(window: int | None, seed: int) -> None:
    """Bounds on staleness and live samples, and no more work in a moment than there are slots, engines and trainers."""
    rng = random.Random(seed)
    lengths = [1 + int(rng.expovariate(0.1)) for _ in range(500)]
    staleness = rng.randint(0, 3) if window is None else window - 1
    group = rng.choice([1, 2, 4])
    setting = Setting(
        batches=6, batch_size=8, group_size=group, engines=rng.choice([1, 3]), slots=2, token_seconds=0.25,
        window=window, max_staleness=staleness, stream=rng.random() < 0.5, mini_batches=8 // group,
    )  # fmt: skip
    outcome = simulate(setting, lengths.__getitem__)
    done = [sample for sample in outcome.samples if sample.trained is not None]
    assert len(done) == 6 * 8
    assert len(outcome.samples) - len(done) == outcome.dropped
    assert max(outcome.ages) <= staleness
    assert outcome.most_live <= (staleness + 1) * 8
    assert outcome.busy_slots <= 1 and outcome.busy_trainer <= 1
    for sample in outcome.samples:
        assert sample.started is not None and sample.finished is not None
        assert sample.sent <= sample.started == sample.finished - sample.length
    for engine in range(setting.engines):
        of = [sample for sample in outcome.samples if sample.engine == engine]
        for one in of:
            running = sum(s.started <= one.started < s.finished for s in of)  # type: ignore[operator]
            assert running <= setting.slots


def test_lengths_are_log_normal() -> None:
    """Over evenly spread seeds: the mean is 200, the median exp(ln 200 - 1/2) = 121."""
    lengths = sorted(response_length(seed) for seed in range(0, SEEDS, SEEDS // 20_000))
    assert sum(lengths) / len(lengths) == pytest.approx(200, rel=0.01)
    assert lengths[len(lengths) // 2] == 121
    assert lengths[0] >= 1


def test_a_run_knows_its_lengths() -> None:
    """The same seed gives the same lengths, another seed or member of a group another one."""
    ours, again, others = lengths_of_run(7, 8), lengths_of_run(7, 8), lengths_of_run(8, 8)
    some = [ours(i) for i in range(64)]
    assert some == [again(i) for i in range(64)]
    assert some != [others(i) for i in range(64)]
    assert len(set(some)) > 32
