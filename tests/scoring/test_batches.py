"""When a batch is whole, for a critic."""

from hypothesis import given
from hypothesis import strategies as st

from meshy.columns import ANY_BATCH
from meshy.scoring.batches import Batches


def add(batches: Batches, rows: list[tuple[str, int, int]]):
    """rows: uid, position, batch."""
    columns = {
        "position": [p for _, p, _ in rows],
        "batch": [b for _, _, b in rows],
        "reward": [float(p) for _, p, _ in rows],
    }
    return batches.add([uid for uid, _, _ in rows], [0] * len(rows), columns)


def test_rows_wait_for_their_own_batch():
    batches = Batches(2)
    assert add(batches, [("0.0", 0, 0), ("2.0", 2, 1)]) == []
    (whole,) = add(batches, [("3.0", 3, 1)])
    assert whole.uids == ("2.0", "3.0") and whole.columns["reward"] == [2.0, 3.0]
    assert batches.rows == 1
    (whole,) = add(batches, [("1.0", 1, 0)])
    assert whole.uids == ("0.0", "1.0") and batches.rows == 0


@given(st.permutations(range(12)), st.lists(st.integers(1, 5), min_size=12))
def test_a_batch_is_the_same_in_whatever_order_its_rows_come(order, cuts):
    batches, whole, rest = Batches(4), [], list(order)
    while rest:
        some, rest = rest[: cuts[0]], rest[cuts[0] :]
        cuts = cuts[1:] or [1]
        whole += add(batches, [(f"{p}.0", p, p // 4) for p in some])
    assert sorted(batch.uids for batch in whole) == sorted(
        tuple(f"{p}.0" for p in range(b * 4, b * 4 + 4)) for b in range(3)
    )


def test_without_a_window_whatever_comes_makes_batches_up():
    batches = Batches(3)
    first, second = add(batches, [(f"{p}.0", p, ANY_BATCH) for p in (5, 1, 3, 0, 2, 4, 9)])
    assert first.uids == ("1.0", "3.0", "5.0") and second.uids == ("0.0", "2.0", "4.0")
    assert batches.rows == 1
