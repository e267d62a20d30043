import pytest

from meshy.training.weights.choice import Target, choose

HERE = Target("inference.0", "http://a:1", ("a",))
THERE = Target("inference.1", "http://b:1", ("b",))
SPREAD = Target("inference.2", "http://a:2", ("a", "b"), ranks=2)
SEVERAL = Target("inference.3", "http://a:3", ("a",), dp=2)
QUANTISED = Target("inference.4", "http://a:4", ("a",), quantization="fp8")
RINGED = Target("inference.5", "http://b:5", ("b",), in_ring=True)


@pytest.mark.parametrize(
    ("targets", "mode"),
    [
        ([HERE], "shm"),
        ([HERE, THERE], "collective"),
        ([SPREAD], "collective"),
        ([HERE, SEVERAL], "disk"),
        ([QUANTISED], "disk"),
        ([RINGED], "disk"),
    ],
)
def test_auto_follows_where_the_replicas_are(targets, mode):
    assert choose("auto", "a", targets) == mode


@pytest.mark.parametrize(
    ("wanted", "targets", "said"),
    [
        ("shm", [HERE, THERE], "inference.1 is on b, the trainer on a"),
        ("shm", [SPREAD], "inference.2 is on a, b"),
        ("collective", [SEVERAL], "inference.3 has dp=2"),
        ("collective", [RINGED], "inference.5 is in a ring"),
        ("shm", [QUANTISED], "inference.4 has quantised weights"),
    ],
)
def test_a_way_that_cannot_be_gone_is_refused_by_name(wanted, targets, said):
    with pytest.raises(ValueError, match=said):
        choose(wanted, "a", targets)


def test_disk_is_always_possible():
    assert choose("disk", "a", [HERE, THERE, SEVERAL, RINGED]) == "disk"
