import pickle

import pytest

from meshy.queue.endpoints import Endpoints
from meshy.queue.errors import UnknownName
from meshy.queue.local import free_endpoints
from meshy.queue.rights import Rights
from meshy.queue.rows import Rows


def test_unknown_names_are_answered_with_the_nearest(contract):
    rights = Rights(contract, "writer.0")
    with pytest.raises(UnknownName, match=r"no partition 'rows' \(did you mean 'rows"):
        rights.partition("rows")
    with pytest.raises(UnknownName, match=r"no column 'rewards' \(did you mean 'reward'\?\)"):
        rights.check_writable("rows0", ["rewards"])
    with pytest.raises(UnknownName, match="'scorer' does not declare that it produces rows0 'reward'"):
        Rights(contract, "scorer.0").check_writable("rows0", ["reward"])
    with pytest.raises(UnknownName, match=r"no consumer 'loger' \(did you mean 'logger'\?\)"):
        Rights(contract, "logger.0").consumer("rows0", "loger")
    with pytest.raises(UnknownName, match=r"writer\.0 is no consumer"):
        rights.consumer("rows0")
    with pytest.raises(UnknownName, match=r"<group>\.<replica>"):
        Rights(contract, "writer")


def test_each_replica_finds_its_own_consumer(contract):
    assert Rights(contract, "walker.1").consumer("gate") == "walker.1"
    assert Rights(contract, "walker.0").consumer("gate", "walker") == "walker.0"
    assert Rights(contract, "scorer.1").consumer("rows0") == "scorer"
    with pytest.raises(UnknownName, match=r"walker\.1"):
        Rights(contract, "walker.0").consumer("gate", "walker.1")


def test_endpoints_travel_as_json():
    endpoints = free_endpoints(3).for_run("mine")
    assert Endpoints.from_json(endpoints.to_json()) == endpoints
    assert endpoints.roles == ("controller", "storage.0", "storage.1", "storage.2")
    assert endpoints.address("storage.1") == "mine/storage.1"
    with pytest.raises(ValueError, match=r"no process 'storage\.3'"):
        endpoints.host_of("storage.3")


def test_rows_are_a_small_picklable_handle():
    rows = Rows("train", ("a", "b", "c"), (4, 7, 1), "trainer")
    assert pickle.loads(pickle.dumps(rows)) == rows
    assert len(rows) == 3 and list(rows.select([2, 0])) == ["c", "a"]
    assert Rows.concat([rows.select([0]), rows.select([1, 2])]) == rows
    with pytest.raises(ValueError, match="one partition"):
        Rows.concat([rows, Rows("train", (), ())])
