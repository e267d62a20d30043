"""Columns that only some rows have."""

from __future__ import annotations

import pytest
import torch

from meshy.queue.errors import MissingColumn, StaleRows, UnknownName

from .conftest import make_rows, scores


@pytest.fixture
def rows(writer, partition):
    """Rows 0, 2 and 4 of these six have all columns, the others only three. They lie on two storage units."""
    parts = []
    for i in range(6):
        whole = make_rows([f"u{i}"], length=i)
        whole |= {"reward": [0.25 * i], "truncated": [i > 2], "seconds": [1e9 + i]}
        parts.append(writer.put(partition, whole if i % 2 == 0 else {k: whole[k] for k in ("uid", "tokens", "mask")}))
    assert {index % 2 for part in parts for index in part.indexes} == {0, 1}
    return type(parts[0]).concat(parts)


def test_rows_that_lack_an_optional_column_give_none(writer, rows):
    names = ("logprobs", "topk", "reward", "truncated", "seconds", "half", "info", "versions")
    read = writer.read(rows, ["uid", "tokens"], optional=names)
    assert list(read) == ["uid", "tokens", *names]
    assert read["uid"] == list(rows) and [len(row) for row in read["tokens"]] == list(range(6))
    for name in names:
        assert [value is None for value in read[name]] == [False, True] * 3
    assert read["reward"][::2] == [0.0, 0.5, 1.0] and read["truncated"][::2] == [False, False, True]
    assert read["seconds"][4] == 1e9 + 4 and all(type(value) is float for value in read["seconds"][::2])
    assert [list(row.shape) for row in read["topk"][::2]] == [[0, 3], [2, 3], [4, 3]]
    assert read["versions"][4].dtype == torch.int32 and read["info"][2] == {"turn": (0, None), "set": {0}}
    read["logprobs"][4].add_(1)  # what is read can be written to


def test_an_optional_column_may_be_there_or_lack_in_all_rows(writer, rows):
    full = writer.read(rows, ["uid", "mask"], optional=["mask", "score"])
    assert full["score"] == [None] * 6
    assert [len(row) for row in full["mask"]] == list(range(6))
    assert writer.read(rows.select([4, 0]), [], optional=["reward"]) == {"reward": [1.0, 0.0]}
    assert writer.read(rows.select([1]), [], optional=["reward"]) == {"reward": [None]}
    assert writer.read(rows.select([]), ["reward"], optional=["reward", "topk"]) == {"reward": [], "topk": []}


def test_other_columns_must_be_there_and_all_must_be_known(writer, rows):
    with pytest.raises(MissingColumn, match=r"'reward' has not been written into 3 of \d rows, .* or as optional"):
        writer.read(rows, ["reward"], optional=["topk"])
    with pytest.raises(UnknownName, match=r"no column 'rewrad' \(did you mean 'reward'\?\)"):
        writer.read(rows, ["uid"], optional=["rewrad"])


def test_an_optional_read_of_a_reused_row_is_refused(writer, scorer, logger, trainer, partition):
    put = writer.put(partition, make_rows(["a", "b"]))
    scorer.write(scorer.take(partition, at_least=2), scores(5, 2))
    logger.ack(logger.take(partition, at_least=2))
    trainer.clear(trainer.take(partition, at_least=2))
    with pytest.raises(StaleRows, match=r"read of '.' refused by .*: row \d+ was cleared"):
        writer.read(put, [], optional=["reward"])
