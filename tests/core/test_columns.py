"""The column contract: what a run's roles declare must fit together."""

from __future__ import annotations

from meshy.columns import (
    TRAIN_COLUMNS,
    UID,
    Column,
    Consumes,
    Contract,
    Declaration,
    Produces,
    derive_contract,
)

SCORE = Column("score", "float32")
WRITER = Declaration("rollout", 1, (), (Produces("train", TRAIN_COLUMNS, creates=True),), {"train": 64})


def trainer(*also: Column | str, end: bool = True, name: str = "trainer") -> Declaration:
    return Declaration(name, 1, (Consumes("train", (*TRAIN_COLUMNS, *also), end=end),), ())


def scorer(group: str = "scorer", column: Column = SCORE, route: str | None = None) -> Declaration:
    return Declaration(group, 1, (Consumes("train", ("tokens",)),), (Produces("train", (column,), route=route),))


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
    apart = (WRITER, scorer("a", route="math"), scorer("b", route="code"), trainer(SCORE))
    assert faults(*apart) == []
    same = (WRITER, scorer("a", route="math"), scorer("b", route="math"), trainer(SCORE))
    assert any("two producers" in fault for fault in faults(*same))


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
    contract, _ = derive_contract([WRITER, scorer(), trainer(SCORE)])
    again = Contract.from_json(contract.to_json())
    assert again.to_json() == contract.to_json()
    assert again.partition("train").end_consumer == contract.partition("train").end_consumer
