"""The data order."""

import pytest

from meshy.data.order import DataOrder


@pytest.mark.parametrize("length", [1, 2, 7, 16, 17])
def test_every_epoch_holds_every_row_once(length):
    order = DataOrder(length, seed=3)
    for epoch in range(4):
        positions = range(epoch * length, (epoch + 1) * length)
        assert sorted(map(order.index, positions)) == list(range(length))
        assert {order.epoch(position) for position in positions} == {epoch}


def test_epochs_and_seeds_differ():
    def epoch(seed, number):
        return [DataOrder(50, seed).index(number * 50 + offset) for offset in range(50)]

    orders = [epoch(0, 0), epoch(0, 1), epoch(1, 0), epoch(1, 1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert orders[0] != sorted(orders[0])


def test_positions_may_be_asked_in_any_order():
    forwards = [DataOrder(10, 5).index(position) for position in range(40)]
    order = DataOrder(10, 5)
    assert [order.index(position) for position in reversed(range(40))] == forwards[::-1]


def test_the_order_is_the_same_in_every_process_and_version():
    assert [DataOrder(5, 0).index(position) for position in range(10)] == [2, 3, 1, 0, 4, 3, 0, 2, 4, 1]


def test_an_empty_dataset_and_negative_positions_are_refused():
    with pytest.raises(ValueError, match="empty"):
        DataOrder(0, 0)
    with pytest.raises(ValueError, match="never negative"):
        DataOrder(3, 0).index(-1)
