from __future__ import annotations

from meshy.generation.control import Control
from meshy.generation.transport import Transport
from meshy.training.weights.bracket import Bracket

URL = "http://127.0.0.1:1"


def bracket(deadline: float) -> Bracket:
    return Bracket(Control([URL], Transport(), deadline), [URL], deadline)


def test_nobody_takes_part_beyond_the_deadline():
    inside, beyond = bracket(60.0), bracket(0.0)
    inside.expire()
    beyond.expire()
    assert inside.living == [URL] and inside.dropped == {}
    assert beyond.living == [] and "within the deadline of a publish" in beyond.dropped[URL]
    assert beyond.refused == set()
