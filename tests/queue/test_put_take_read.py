import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from meshy.observe.ask import ask_json
from meshy.queue.controller import Controller
from meshy.queue.errors import ColumnError, DuplicateUid, MissingColumn, QueueFull, QueueTimeout, UnknownName
from meshy.queue.local import LocalQueue, free_endpoints

from .conftest import CAPACITY, COLUMNS, make_rows, scores


def test_every_kind_of_column_comes_back_as_it_was_put(writer, partition):
    put = make_rows([f"u{i}" for i in range(7)], length=0)  # the first row has no token at all
    put["logprobs"][3][1] = float("nan")
    rows = writer.put(partition, put)
    back = writer.read(rows, [column.name for column in COLUMNS])
    for name in ("tokens", "logprobs", "mask", "versions", "topk"):
        assert all(
            torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in zip(back[name], put[name], strict=True)
        )
        assert all(a.dtype == b.dtype for a, b in zip(back[name], put[name], strict=True))
    assert torch.isnan(back["logprobs"][3][1])
    assert back["uid"] == put["uid"] and back["info"] == put["info"]
    assert back["reward"].tolist() == put["reward"] and back["reward"].dtype == torch.float32
    assert back["seconds"].tolist() == put["seconds"] and back["truncated"].tolist() == put["truncated"]
    assert torch.equal(back["half"], put["half"]) and back["half"].dtype == torch.bfloat16
    part = writer.read(rows.select([5, 2]), ["uid", "tokens"])
    assert part["uid"] == ["u5", "u2"] and torch.equal(part["tokens"][0], put["tokens"][5])


def test_a_consumer_sees_a_row_only_when_its_columns_are_there(writer, scorer, logger, trainer, partition):
    writer.put(partition, make_rows(["a", "b", "c"]))
    with pytest.raises(
        QueueTimeout, match=r"'trainer' has waited .* missing score in 3, ack.scorer in 3, ack.logger in 3"
    ):
        trainer.take(partition, timeout=0)
    taken = scorer.take(partition, at_least=3)
    logger.ack(logger.take(partition, at_least=3))
    scorer.write(taken.select([1]), {"score": [torch.ones(6)]})
    seen = trainer.take(partition)
    assert list(seen) == ["b"]
    assert sorted(trainer.read(seen)) == ["reward", "score", "tokens", "uid"]
    with pytest.raises(MissingColumn, match=r"'score' has not been written into 2 of 2 rows, such as 'a'"):
        trainer.read(taken.select([0, 2]), ["uid", "score"])
    trainer.clear(seen)


def test_take_gives_what_is_ready_between_its_bounds_oldest_first(writer, scorer, partition):
    writer.put(partition, make_rows([f"u{i}" for i in range(10)]))
    assert list(scorer.take(partition, at_least=2, at_most=4)) == ["u0", "u1", "u2", "u3"]
    with pytest.raises(QueueTimeout, match=r"for 7 rows of .*; 6 are ready; nobody has put more rows \(10 alive"):
        scorer.take(partition, at_least=7, timeout=0.05)
    assert list(scorer.take(partition, at_least=5)) == [f"u{i}" for i in range(4, 10)]


def test_rows_are_handed_out_in_the_order_of_creation_though_indexes_are_used_again(
    writer, scorer, logger, trainer, partition
):
    def through(uids):
        writer.put(partition, make_rows(uids))
        scored = scorer.take(partition, at_least=len(uids))
        scorer.write(scored, scores(5, len(uids)))
        logger.ack(logger.take(partition, at_least=len(uids)))
        return trainer.take(partition, at_least=len(uids))

    first = through(["a", "b", "c", "d"])
    trainer.clear(first.select([3, 1]))
    later = through(["e", "f", "g"])
    assert list(later) == ["e", "f", "g"]
    assert set(later.indexes) & {first.indexes[1], first.indexes[3]}
    trainer.clear(later)


def test_replicas_share_a_consumer_and_never_get_a_row_twice(writer, clients, partition):
    def drain(client):
        got = []
        while True:
            try:
                got += list(client.take(partition, at_most=3, timeout=0.5))
            except QueueTimeout:
                return got

    with ThreadPoolExecutor() as threads:
        drains = [threads.submit(drain, clients[name]) for name in ("scorer.0", "scorer.1", "scorer.0")]
        for i in range(8):
            writer.put(partition, make_rows([f"{i}.{j}" for j in range(5)]))
        got = [uid for drained in drains for uid in drained.result()]
    assert sorted(got) == sorted(f"{i}.{j}" for i in range(8) for j in range(5))


def test_every_replica_reads_every_gate_in_order_and_the_end_consumer_clears(clients):
    keeper, walkers = clients["gatekeeper.0"], [clients["walker.0"], clients["walker.1"]]
    for step in range(3):
        keeper.put("gate", {"uid": [f"gate{step}"], "step": [step]})
    for walker in walkers:
        gates = walker.take("gate", at_least=3)
        assert walker.read(gates, ["step"])["step"].tolist() == [0, 1, 2]
        with pytest.raises(QueueTimeout):
            keeper.take("gate", timeout=0)
        walker.ack(gates)
    keeper.clear(keeper.take("gate", at_least=3))
    assert keeper.table()["gate"]["rows"] == 0


def test_a_put_beyond_the_capacity_writes_nothing(writer, partition):
    writer.put(partition, make_rows([f"u{i}" for i in range(CAPACITY - 2)], length=1))
    with pytest.raises(QueueFull, match=rf"holds {CAPACITY - 2} rows of at most {CAPACITY}; 3 more were not written"):
        writer.put(partition, make_rows(["x", "y", "z"]))
    assert writer.table()[partition]["rows"] == CAPACITY - 2
    writer.put(partition, make_rows(["x", "y"]))


def test_bad_rows_are_refused_whole(writer, scorer, partition):
    good = make_rows(["a", "b"])
    with pytest.raises(ColumnError, match=rf"writer.0, partition '{partition}': column 'reward' is float32"):
        writer.put(partition, {**good, "reward": torch.tensor([1, 2])})
    with pytest.raises(ColumnError, match="'mask' has 1 entries in row 'a', whose tokens are 5"):
        writer.put(partition, {**good, "mask": [[True], [True]]})
    with pytest.raises(ColumnError, match="need a column 'uid'"):
        writer.put(partition, {"reward": [1.0]})
    with pytest.raises(UnknownName, match="did you mean 'reward'"):
        writer.put(partition, {**good, "rewrad": [1.0, 2.0]})
    with pytest.raises(DuplicateUid, match="has a row 'a' already"):
        writer.put(partition, make_rows(["a", "a"]))
    writer.put(partition, good)
    with pytest.raises(DuplicateUid, match="has a row 'b' already"):
        writer.put(partition, make_rows(["c", "b"]))
    taken = scorer.take(partition, at_least=2)
    with pytest.raises(ColumnError, match="'score' has 3 entries in row 'a', whose tokens are 5"):
        scorer.write(taken, {"score": [torch.ones(3), torch.ones(6)]})
    with pytest.raises(ColumnError, match="has 1 entries for 2 rows"):
        scorer.write(taken, {"score": [torch.ones(5)]})
    table = writer.table()[partition]
    assert table["rows"] == 2 and table["columns"]["score"] == 0 and table["columns"]["ack.scorer"] == 0


def test_no_rows_at_all(writer, partition):
    nothing = writer.put(partition, {"uid": [], "reward": [], "tokens": []})
    assert len(nothing) == 0
    assert writer.read(nothing, ["reward", "tokens"])["reward"].shape == (0,)


def test_the_table_says_who_waits_for_what(queue: LocalQueue, writer, scorer, logger, partition):
    writer.put(partition, make_rows(["a", "b", "c"]))
    scorer.write(scorer.take(partition, at_least=3), scores(5, 3), ack=False)
    logger.ack(logger.take(partition, at_most=1))
    table = json.loads(json.dumps(writer.table()))[partition]
    assert table["columns"]["tokens"] == 3 and table["columns"]["ack.logger"] == 1
    assert table["consumers"]["logger"] == {"end": False, "taken": 1, "ready": 2, "waiting": 0, "missing": {}}
    waiting = table["consumers"]["trainer"]
    assert waiting["waiting"] == 3 and waiting["missing"] == {"ack.scorer": 3, "ack.logger": 2}
    controller = queue.endpoints.controller
    assert ask_json(controller.host, controller.admin, "/table", deadline=5.0)[1][partition] == table


def test_one_client_serves_many_threads(writer, scorer, partition):
    barrier = threading.Barrier(6)

    def work(i):
        barrier.wait()
        rows = writer.put(partition, make_rows([f"{i}.a", f"{i}.b"]))
        return writer.read(rows, ["uid"])["uid"] == [f"{i}.a", f"{i}.b"]

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(6)))
    assert len(scorer.take(partition, at_least=12)) == 12


def test_a_take_may_wait_until_the_partition_is_filled(writer, scorer, logger, partition):
    writer.put(partition, make_rows(["a", "b"]))
    with pytest.raises(QueueTimeout, match=r"for 1 rows of .* while 4 are alive; 2 are ready; only 2 are alive"):
        scorer.take(partition, timeout=0, alive=4)
    logger.take(partition, at_least=2)  # rows count, taken or not
    got = []
    thread = threading.Thread(target=lambda: got.append(scorer.take(partition, at_most=3, alive=4)))
    thread.start()
    writer.put(partition, make_rows(["c"]))
    writer.put(partition, make_rows(["d"]))
    thread.join(20)
    assert [list(rows) for rows in got] == [["a", "b", "c"]]
    assert list(scorer.take(partition, timeout=0, alive=4)) == ["d"]
    with pytest.raises(QueueTimeout, match=r"while 4 are alive; 0 are ready; nobody has put more rows \(4 alive, 4 of"):
        scorer.take(partition, timeout=0, alive=4)
    with pytest.raises(ValueError, match=f"never holds alive={CAPACITY + 1} rows, but {CAPACITY}"):
        scorer.take(partition, alive=CAPACITY + 1)


def test_rows_that_are_cleared_or_not_yet_written_do_not_fill_a_partition(contract):
    controller = Controller(free_endpoints(), contract)
    uids = ["a", "b"]
    indexes = controller.reserve("gate", uids, "gatekeeper.0")["indexes"]
    controller.reserve("gate", ["c"], "gatekeeper.0")
    controller.commit("gate", indexes, uids, ["uid", "step", "ack.walker.0", "ack.walker.1"])
    assert controller.take("gate", "walker.0", 1, None, "walker.0", alive=3)["uids"] == []
    assert controller.take("gate", "gatekeeper", 1, 1, "gatekeeper.0", alive=2)["uids"] == ["a"]
    controller.mark_clearing_rows("gate", "gatekeeper", indexes[:1], uids[:1])
    assert controller.take("gate", "walker.0", 1, None, "walker.0", alive=2)["uids"] == []
    assert controller.take("gate", "walker.0", 1, None, "walker.0", alive=1)["uids"] == ["b"]
