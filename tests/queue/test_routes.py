"""Rows that are for some readers only."""

from __future__ import annotations

import pytest

from meshy.queue.errors import QueueTimeout

from .conftest import make_rows, scores


def test_a_reader_of_a_route_sees_its_rows_alone(writer, clients, mixed):
    for uid, route in (("m0", "math"), ("plain", None), ("c0", "code"), ("m1", "math")):
        writer.put(mixed, make_rows([uid], route=route))
    taken = clients["math.0"].take(mixed, at_least=2)
    assert list(taken) == ["m0", "m1"]
    assert sorted(clients["math.0"].read(taken)) == ["tokens", "uid"]
    assert list(clients["code.0"].take(mixed)) == ["c0"]
    with pytest.raises(QueueTimeout, match=r"nobody has put more rows with route\.math \(4 alive, 2 of them taken"):
        clients["math.1"].take(mixed, timeout=0)


def test_rows_of_no_route_or_another_are_not_held_up(writer, clients, logger, trainer, mixed):
    for uid, route in (("m", "math"), ("c", "code"), ("plain", None)):
        writer.put(mixed, make_rows([uid], route=route))
    logger.ack(logger.take(mixed, at_least=3))
    plain = trainer.take(mixed)
    assert list(plain) == ["plain"]
    code = clients["code.0"].take(mixed)
    clients["code.0"].write(code, scores(5, 1), ack=False)
    with pytest.raises(
        QueueTimeout, match=r"2 rows are incomplete, missing score in 1, ack\.math in 1, ack\.code in 1"
    ):
        trainer.take(mixed, timeout=0)  # the score is not enough: its reader has not acknowledged
    clients["code.0"].ack(code)
    assert list(trainer.take(mixed)) == ["c"]
    clients["math.1"].write(clients["math.1"].take(mixed), scores(5, 1))
    last = trainer.take(mixed)
    assert list(last) == ["m"]
    for rows in (plain, last):
        trainer.clear(rows)
    assert writer.table()[mixed]["rows"] == 1


def test_a_row_of_two_routes_waits_for_both_readers(writer, clients, logger, trainer, mixed):
    writer.put(mixed, make_rows(["both"], route="math") | {"route.code": [True]})
    logger.ack(logger.take(mixed))
    for group in ("math", "code"):
        with pytest.raises(QueueTimeout):
            trainer.take(mixed, timeout=0)
        clients[f"{group}.0"].write(clients[f"{group}.0"].take(mixed), scores(5, 1))
    assert list(trainer.take(mixed)) == ["both"]


def test_what_rows_of_other_routes_lack_is_none_in_a_plain_read(writer, clients, logger, trainer, mixed):
    writer.put(mixed, make_rows(["plain"]))
    writer.put(mixed, make_rows(["m"], route="math"))
    clients["math.0"].write(clients["math.0"].take(mixed), {"score": [[1.0] * 5]})
    logger.ack(logger.take(mixed, at_least=2))
    read = trainer.read(trainer.take(mixed, at_least=2))
    assert read["uid"] == ["plain", "m"]
    assert read["score"][0] is None and read["score"][1].tolist() == [1.0] * 5


def test_the_table_counts_for_a_reader_of_a_route_its_rows_alone(writer, clients, mixed):
    writer.put(mixed, make_rows(["m0", "m1"], route="math"))
    writer.put(mixed, make_rows(["a", "b", "c"]))
    clients["math.0"].take(mixed, at_most=1)
    consumers = writer.table()[mixed]["consumers"]
    assert consumers["math"] == {"end": False, "taken": 1, "ready": 1, "waiting": 0, "missing": {}}
    assert consumers["code"] == {"end": False, "taken": 0, "ready": 0, "waiting": 0, "missing": {}}
    assert consumers["trainer"]["missing"] == {"score": 2, "ack.math": 2, "ack.logger": 5}
