"""The column contract: what a run's roles declare must fit together."""

from __future__ import annotations

import json
from dataclasses import replace

from meshy.colocation.columns import ring_declarations
from meshy.columns import TRAIN_COLUMNS, UID, Column, Consumes, Contract, Produces, route_column
from meshy.contract import Declaration, derive_contract

SCORE = Column("score", "float32")
WRITER = Declaration("rollout", 1, (), (Produces("train", TRAIN_COLUMNS, creates=True),), {"train": 64})


def trainer(*also: Column | str, end: bool = True, name: str = "trainer") -> Declaration:
    return Declaration(name, 1, (Consumes("train", (*TRAIN_COLUMNS, *also), end=end),), ())


def scorer(group: str = "scorer", column: Column = SCORE, route: str | None = None) -> Declaration:
    consumes = Consumes("train", ("tokens",), route=route)
    return Declaration(group, 1, (consumes,), (Produces("train", (column,), route=route),))


def writer(*routes: str) -> Declaration:
    """A writer of rows, some of which are of a route."""
    columns = tuple(Column(route_column(route), "bool") for route in routes)
    return Declaration("rollout", 1, (), (Produces("train", (*TRAIN_COLUMNS, *columns), creates=True),))


def faults(*declarations: Declaration) -> list[str]:
    return derive_contract(declarations)[1]


def test_the_end_consumer_waits_for_every_acknowledgement() -> None:
    contract, found = derive_contract([WRITER, scorer(), trainer(SCORE)])
    assert found == []
    train = contract.partition("train")
    assert train.end_consumer.columns[-2:] == ("score", "ack.scorer")
    assert train.consumers["scorer"].columns == ("tokens",)
    assert train.writers["scorer"] == ("score", "ack.scorer")
    assert train.columns["ack.scorer"].dtype == "int64"


def test_each_replica_can_be_a_reader_of_its_own() -> None:
    gates = Declaration("rollout", 2, (Consumes("gate", (UID,), per_replica=True),), ())
    keeper = Declaration("trainer", 1, (Consumes("gate", (UID,), end=True),), (Produces("gate", (UID,), creates=True),))
    contract, found = derive_contract([gates, keeper])
    assert found == []
    assert set(contract.partition("gate").consumers) == {"rollout.0", "rollout.1", "trainer"}
    assert contract.partition("gate").end_consumer.columns == ("uid", "ack.rollout.0", "ack.rollout.1")


def test_a_consumed_column_needs_a_producer() -> None:
    assert "consumes train.score, which nothing produces" in faults(WRITER, trainer("score"))[0]
    assert "(did you mean 'reward'?)" in faults(WRITER, trainer("rewards"))[0]


def test_a_column_has_one_producer_unless_routes_part_them() -> None:
    two = (WRITER, scorer("a"), scorer("b"), trainer(SCORE))
    assert any("train.score has two producers, 'a' and 'b'" in fault for fault in faults(*two))
    routed = writer("math", "code")
    apart = (routed, scorer("a", route="math"), scorer("b", route="code"), trainer(SCORE))
    assert faults(*apart) == []
    same = (routed, scorer("a", route="math"), scorer("c", route="code"), scorer("b", route="math"), trainer(SCORE))
    assert any("two producers, 'a' and 'b'; drop one, or give each a route" in fault for fault in faults(*same))
    for mixed in ((scorer("a", route="math"), scorer("b")), (scorer("b"), scorer("a", route="math"))):
        assert faults(routed, *mixed, trainer(SCORE)) == [
            "train.score has two producers, 'a' in rows of route 'math' and 'b' in all rows; drop one, or give 'b' a "
            "route of its own"
        ]


def test_a_ledger_may_be_written_by_several_and_is_not_consumed() -> None:
    declarations = [*ring_declarations("one", {"trainer": 1, "inference": 2}), WRITER, trainer()]
    assert faults(*declarations) == []
    alone = Declaration("other", 1, (), (Produces("colocate.one", (Column("reason", "str"),)),))
    assert any(
        "colocate.one.reason has two producers, 'trainer' and 'other'" in f for f in faults(*declarations, alone)
    )


# Routes ---------------------------------------------------------------------------------------------------------------


def test_a_reader_of_a_route_waits_for_its_column_and_others_wait_only_in_its_rows() -> None:
    logger = Declaration("logger", 1, (Consumes("train", ("uid", "score")),), ())
    math, code = scorer("a", route="math"), scorer("b", route="code")
    contract, found = derive_contract([writer("math", "code"), math, code, logger, trainer(SCORE)])
    assert found == []
    train = contract.partition("train")
    assert train.consumers["a"].columns == ("tokens", "route.math")
    assert train.consumers["a"].route == "route.math" and train.consumers["a"].routed == {}
    both = ("route.code", "route.math")
    assert train.consumers["logger"].routed == {"score": both}
    assert train.end_consumer.route is None
    assert train.end_consumer.routed == {"score": both, "ack.a": ("route.math",), "ack.b": ("route.code",)}
    assert train.end_consumer.columns[-4:] == ("score", "ack.a", "ack.b", "ack.logger")


def test_a_reader_of_a_route_waits_in_each_of_its_rows_for_what_is_written_there() -> None:
    critic = scorer("critic", Column("value", "float32"), route="math")
    chained = Declaration("judge", 1, (Consumes("train", ("value",), route="math"),), ())
    contract, found = derive_contract([writer("math"), critic, chained, trainer("value")])
    assert found == []
    assert contract.partition("train").consumers["judge"].routed == {}


def test_every_replica_of_a_route_acknowledges_its_rows_alone() -> None:
    readers = Declaration("logger", 2, (Consumes("train", ("uid",), per_replica=True, route="math"),), ())
    contract, found = derive_contract([writer("math"), readers, trainer()])
    assert found == []
    routed = contract.partition("train").end_consumer.routed
    assert routed == {"ack.logger.0": ("route.math",), "ack.logger.1": ("route.math",)}


def test_a_route_must_be_written_by_whoever_creates_the_rows() -> None:
    (unknown,) = faults(writer("math"), scorer(route="maths"), trainer(SCORE))
    assert "'scorer' reads rows of route 'maths' in 'train', but nothing produces route.maths (did you mean" in unknown
    labels = Column("route.math", "bool")
    late = Declaration("labeller", 1, (Consumes("train", ("tokens",)),), (Produces("train", (labels,)),))
    (too_late,) = faults(WRITER, late, scorer(route="math"), trainer(SCORE))
    assert "train.route.math is written by 'labeller', which creates no rows there" in too_late


def test_a_role_reads_the_rows_into_which_it_writes() -> None:
    column = (Column("score", "float32"),)
    reads, writes = Consumes("train", ("tokens",)), Produces("train", column)
    astray = Declaration("s", 1, (replace(reads, route="math"),), (replace(writes, route="code"),))
    (fault,) = faults(writer("math", "code"), astray, trainer(SCORE))
    assert "'s' produces train.score for rows of route 'code', which it does not read" in fault
    everywhere = Declaration("s", 1, (replace(reads, route="math"),), (writes,))
    (fault,) = faults(writer("math"), everywhere, trainer(SCORE))
    assert "'s' produces train.score for all rows, but reads only those of route 'math'; name the route" in fault
    two_readers = replace(everywhere, consumes=(*everywhere.consumes, replace(reads, consumer="all")))
    assert faults(writer("math"), two_readers, trainer(SCORE)) == []


def test_the_end_consumer_reads_all_rows() -> None:
    only = Declaration("trainer", 1, (Consumes("train", ("uid",), end=True, route="math"),), ())
    (fault,) = faults(writer("math"), only)
    assert "'trainer' clears partition 'train', but only rows with route.math: the others would pile up" in fault


def test_what_a_role_adds_to_rows_is_read_by_somebody() -> None:
    (fault,) = faults(WRITER, scorer(), trainer())
    assert fault == (
        "train.score, which 'scorer' would add to the rows of others, is read by nobody: name it in the trainer's "
        "also_consumes, or drop the role"
    )
    logger = Declaration("logger", 1, (Consumes("train", ("uid", "score")),), ())
    assert faults(WRITER, scorer(), logger, trainer()) == []
    assert faults(writer("math"), trainer()) == []  # whoever creates rows may write more than is read


def reader(group: str, reads: str, writes: str, route: str | None = None) -> Declaration:
    consumes = Consumes("train", ("tokens", reads), route=route)
    return Declaration(group, 1, (consumes,), (Produces("train", (Column(writes, "float32"),), route=route),))


def test_roles_that_wait_for_one_another_are_refused() -> None:
    two = (reader("critic", "scores", "values"), reader("teacher", "values", "scores"))
    assert faults(WRITER, *two, trainer("values", "scores")) == [
        "'critic' waits for train.scores of 'teacher', and 'teacher' waits for train.values of 'critic': none of these "
        "ever comes; drop one of the columns"
    ]
    later = reader("judge", "values", "verdict")  # stuck behind the circle, and no part of it
    assert "'judge'" not in faults(WRITER, *two, later, trainer("values", "verdict"))[0]
    alone = faults(WRITER, reader("critic", "values", "values"), trainer("values"))
    assert alone == ["'critic' waits for train.values of 'critic': none of these ever comes; drop one of the columns"]
    chain = (reader("a", "reward", "x"), reader("b", "x", "y"), reader("c", "y", "z"))
    assert faults(WRITER, *chain, trainer("x", "z")) == []


def test_a_circle_is_one_only_in_rows_that_both_read() -> None:
    routed = writer("math", "code")
    apart = (
        reader("a", "y", "x", route="math"), reader("b", "reward", "y", route="math"),
        reader("c", "x", "y", route="code"), reader("d", "reward", "x", route="code"),
    )  # fmt: skip
    assert faults(routed, *apart, trainer("x", "y")) == []
    both = (reader("a", "y", "x", route="math"), reader("b", "x", "y", route="math"))
    assert "'a' waits for train.y of 'b', and 'b' waits for train.x of 'a'" in faults(routed, *both, trainer("x"))[0]


def test_a_column_has_one_type() -> None:
    wide = Column("score", "float64")
    assert any("two types" in f for f in faults(WRITER, scorer("a"), scorer("b", wide), trainer(SCORE)))
    assert any("'trainer' expects scalar float64" in f for f in faults(WRITER, scorer(), trainer(wide)))


def test_a_partition_has_exactly_one_end() -> None:
    assert any("is cleared by nobody" in fault for fault in faults(WRITER, trainer(end=False)))
    assert any("has 2 end consumers" in fault for fault in faults(WRITER, trainer(), trainer(name="other")))


def test_two_readers_of_one_name_are_refused() -> None:
    twin = Declaration("logger", 1, (Consumes("train", ("tokens",), consumer="trainer"),), ())
    assert any("two consumers called 'trainer'" in fault for fault in faults(WRITER, trainer(), twin))


def test_the_contract_survives_json() -> None:
    contract, _ = derive_contract([writer("math"), scorer(route="math"), trainer(SCORE)])
    again = Contract.from_json(json.loads(json.dumps(contract.to_json())))
    assert again.to_json() == contract.to_json()
    assert again.partition("train").consumers == contract.partition("train").consumers
    assert again.partition("train").end_consumer == contract.partition("train").end_consumer
