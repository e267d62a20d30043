import numpy as np
import pytest
import torch

from meshy.columns import Column
from meshy.queue.codec import check_token_lengths, empty, from_wire, join, pack, unpack
from meshy.queue.errors import ColumnError

I64 = Column("ids", "int64", "jagged")
F32 = Column("reward", "float32")
TOPK = Column("topk", "float32", "jagged2d")
COLUMNS = {
    c.name: c
    for c in (
        I64, F32, TOPK, Column("tokens", "int64", "jagged"), Column("flag", "bool"), Column("small", "int32"),
        Column("name", "str"), Column("info", "object", "object"), Column("words", "str", "jagged"),
    )
}  # fmt: skip


def one(name, values):
    """The column's rows after a trip over the wire."""
    packed = pack(COLUMNS, {name: values})[name]
    return unpack(COLUMNS[name], from_wire(packed.wire()))


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 2, 3], [], [4]],
        [torch.tensor([1, 2, 3]), torch.empty(0, dtype=torch.int64), torch.tensor([4])],
        [np.array([1, 2, 3]), np.array([], dtype=np.int64), np.array([4])],
        [[], [], []],
    ],
)
def test_jagged_rows_keep_their_lengths_and_dtype(rows):
    back = one("ids", rows)
    assert [row.tolist() for row in back] == [list(map(int, row)) for row in rows]
    assert all(row.dtype == torch.int64 for row in back)


def test_scalars_come_back_as_one_tensor():
    assert torch.equal(one("reward", [1, 0.5, float("inf")]), torch.tensor([1.0, 0.5, float("inf")]))
    assert torch.isnan(one("reward", torch.tensor([float("nan")]))).all()
    assert torch.equal(one("reward", [torch.tensor(1.0), torch.tensor(2.0)]), torch.tensor([1.0, 2.0]))
    assert one("flag", [True, False]).tolist() == [True, False]


def test_two_dimensional_rows_of_different_lengths():
    rows = [torch.rand(3, 2), torch.rand(0, 2), torch.rand(5, 2)]
    assert all(torch.equal(a, b) for a, b in zip(one("topk", rows), rows, strict=True))
    assert one("topk", [[[1.0, 2.0]], [[3.0, 4.0]]])[1].tolist() == [[3.0, 4.0]]


def test_strings_and_objects():
    assert one("name", ["a", "", "ü"]) == ["a", "", "ü"]
    assert one("info", [{1: (2,)}, None, {3}]) == [{1: (2,)}, None, {3}]
    assert one("words", [["a"], []]) == [["a"], []]


def test_what_is_read_can_be_written_to():
    packed = pack(COLUMNS, {"ids": [[1, 2]]})["ids"]
    (row,) = unpack(COLUMNS["ids"], packed)
    row.add_(1)
    assert packed.values.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("ids", [torch.tensor([1.0])], "is int64, but got float32"),
        ("ids", [np.array([1], dtype=np.int32)], "is int64, but got int32"),
        ("ids", [[1.5]], "is int64, but got float64"),
        ("ids", [[[1, 2]]], "one dimension a row"),
        ("ids", [torch.ones(2, 2, dtype=torch.int64)], r"jagged, but row 0 has shape \[2, 2\]"),
        ("ids", [[2**70]], "int64"),
        ("reward", torch.tensor([1, 2]), "is float32, but got int64"),
        ("reward", ["1"], "is float32, but got <U1"),
        ("reward", [[1.0]], "one value a row"),
        ("reward", [[1.0], [2.0, 3.0]], "reward"),
        ("flag", [1], "is bool, but got int64"),
        ("small", [2**31], "int32"),
        ("name", ["a", 3], "takes str, but got int 3"),
        ("topk", [torch.rand(3)], "jagged2d, but row 0"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(name, values, message):
    with pytest.raises(ColumnError, match=message):
        pack(COLUMNS, {name: values})


def test_columns_must_have_equal_rows_and_token_lengths():
    with pytest.raises(ColumnError, match="different numbers of rows"):
        pack(COLUMNS, {"ids": [[1], [2]], "reward": [1.0]})
    with pytest.raises(ColumnError, match="'ids' has 1 entries in row 1, whose tokens are 2"):
        pack(COLUMNS, {"tokens": [[1], [2, 3]], "ids": [[1], [2]]})
    tokens = pack(COLUMNS, {"tokens": [[1, 2]]})["tokens"]
    check_token_lengths(pack(COLUMNS, {"topk": [torch.rand(2, 4)], "reward": [1.0]}), tokens.sizes)


def test_selecting_and_joining_rows():
    packed = pack(COLUMNS, {"ids": [[1], [2, 3], [4]], "reward": [0.0, 1.0, 2.0], "topk": list(torch.rand(3, 2, 2))})
    assert [r.tolist() for r in packed["ids"].select([2, 1]).rows()] == [[4], [2, 3]]
    assert packed["reward"].select([2, 0]).values.tolist() == [2.0, 0.0]
    assert torch.equal(join(packed["topk"].rows()).values, packed["topk"].values)


def test_no_rows():
    assert empty(F32).dtype == torch.float32
    assert empty(I64) == []
    assert len(pack(COLUMNS, {"ids": [], "reward": [], "topk": [], "name": []})["topk"]) == 0
