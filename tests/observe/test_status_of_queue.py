"""`meshy status` against the queue itself, so that the two agree about `/health` and `/table`."""

import pytest

from meshy.columns import Column, Consumes, Produces
from meshy.contract import Declaration, derive_contract
from meshy.observe.queue_table import depth
from meshy.observe.runfolder import RunFolder, write_json
from meshy.observe.status import look, status

COLUMNS = (Column("uid", "str"), Column("tokens", "int64", "jagged"), Column("reward", "float32"))


@pytest.mark.e2e
def test_the_queue_of_a_run_in_a_table(tmp_path, capfd):
    from meshy.queue.local import local_queue
    from meshy.queue.sync import QueueClient

    contract, faults = derive_contract(
        [
            Declaration("rollout", 1, (), (Produces("train", COLUMNS[:2], creates=True),), {"train": 16}),
            Declaration("scorer", 1, (Consumes("train", ("uid", "tokens")),), (Produces("train", COLUMNS[2:]),)),
            Declaration("trainer", 1, (Consumes("train", ("uid", "tokens", "reward"), end=True),), ()),
        ]
    )
    assert not faults
    with (
        local_queue(contract) as queue,
        QueueClient(queue.endpoints, contract, "rollout.0") as rollout,
        QueueClient(queue.endpoints, contract, "scorer.0") as scorer,
    ):
        controller = queue.endpoints.controller
        ports = [controller.handshake, controller.request, controller.doorbell, controller.admin]
        folder = RunFolder.create("x", run_dir=tmp_path / "run")
        topology = {"services": [], "queue": {"controller": {"host": controller.host, "ports": ports}}}
        write_json(folder.topology, {"run_id": queue.endpoints.run_id, **topology})
        rollout.put("train", {"uid": ["a", "b", "c", "d"], "tokens": [[1], [2], [3], [4]]})
        scorer.write(scorer.take("train", at_least=3, at_most=3), {"reward": [0.0, 0.5, 1.0]})
        seen = look(folder)
        assert [service.state for service in seen.services] == ["ready"]
        train = seen.queue["train"]
        assert (train["rows"], train["columns"]["tokens"], train["columns"]["reward"]) == (4, 4, 3)
        trainer = train["consumers"]["trainer"]
        assert (trainer["ready"], trainer["waiting"], trainer["missing"]["reward"]) == (3, 1, 1)
        assert depth(seen.queue).startswith("4 rows, 1 wait for ")
        assert status(folder.path) == 0
        lines = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
        assert "train 4 of 16 4 uid, tokens" in lines
        assert any(line.startswith("trainer train 3 1 reward (1)") for line in lines)
        write_json(folder.topology, {"run_id": "another", **topology})
        other = look(folder)
        assert other.services[0].state == "foreign" and other.queue is None
