import pytest

from meshy.algorithms.overlong import Overlong, penalty
from tests.algorithms.golden_cases import cases


@pytest.mark.parametrize("c", cases("dapo_overlong"), ids=lambda c: c["name"])
def test_golden(c):
    i, expect = c["input"], c["expect"]
    wanted = expect.get("penalty", expect.get("penalty_paper_floor"))
    assert penalty(i["length"], i["max_len"], i["buffer"], i["factor"]) == pytest.approx(wanted)


def test_it_falls_in_a_line_from_the_buffer_to_the_longest_and_no_further():
    lengths = [0, 80, 81, 90, 100, 101, 1000]
    assert [penalty(n, 100, 20, 2.0) for n in lengths] == pytest.approx([0, 0, -0.1, -1, -2, -2, -2])


def test_faults():
    assert Overlong(buffer=4096).faults() == []
    faults = Overlong(buffer=0, factor=-1).faults()
    assert [fault.split(":")[0] for fault in faults] == ["overlong.buffer", "overlong.factor"]
