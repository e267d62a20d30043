"""Samples over ranks."""

from meshy.titan.sharing import spread


def test_the_dearest_go_first_to_whoever_has_least():
    assert spread({0: 1, 1: 5, 2: 3, 3: 3}, 2) == {1: 0, 2: 1, 3: 1, 0: 0}


def test_what_a_rank_has_already_counts():
    """Rows that come one by one go round."""
    load, homes = [0, 0, 0], []
    for length in (10, 10, 10, 4, 4):
        rank = spread({0: length}, 3, load)[0]
        load[rank] += length
        homes.append(rank)
    assert homes == [0, 1, 2, 0, 1]
