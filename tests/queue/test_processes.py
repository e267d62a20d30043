"""The queue's processes: how they die, and what their clients see then."""

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from meshy.observe.ask import ask_json
from meshy.queue.client import AsyncQueueClient
from meshy.queue.errors import QueueError, QueueUnreachable
from meshy.queue.local import local_queue
from meshy.queue.sync import QueueClient

from .conftest import make_rows

pytestmark = pytest.mark.e2e


def within(seconds, call, *arguments):
    """The error that a call raises, which must come in time."""
    started = time.monotonic()
    with pytest.raises(QueueError) as caught:
        call(*arguments)
    assert time.monotonic() - started < seconds
    return caught.value


def test_killed_processes_are_named_within_the_deadline(contract):
    with (
        local_queue(contract, apart=True) as queue,
        QueueClient(queue.endpoints, contract, "writer.0", deadline=0.7) as writer,
        QueueClient(queue.endpoints, contract, "scorer.0", deadline=0.7) as scorer,
    ):
        controller = queue.endpoints.controller
        status, health = ask_json(controller.host, controller.admin, "/health", deadline=5.0)
        assert status == 200
        assert (health["state"], health["run_id"]) == ("ready", queue.endpoints.run_id)
        writer.put("rows0", make_rows(["a"]))
        rows = scorer.take("rows0")
        queue.kill("storage.0")
        for call in ((scorer.read, rows), (writer.put, "rows0", make_rows(["b"]))):
            assert "queue's storage.0 (tcp://127.0.0.1:" in str(within(5, *call))
        assert scorer.table()["rows0"]["rows"] == 1  # the put that failed left nothing behind
        queue.kill("controller")
        for call in ((scorer.take, "rows0"), (writer.put, "rows0", make_rows(["b"]))):
            error = within(5, *call)
            assert isinstance(error, QueueUnreachable) and "queue's controller (tcp://" in str(error)
        within(5, QueueClient, queue.endpoints, contract, "trainer.0", 0.7)


def test_one_death_ends_the_queue(contract):
    with local_queue(contract) as queue:
        parent = queue.processes["controller"]
        children = psutil.Process(parent.pid).children()
        assert len(children) == 2
        children[1].kill()
        assert parent.wait(10) == 1
        assert "the queue's storage.0" in queue.log.read_text() and "was killed by SIGKILL" in queue.log.read_text()
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive


def test_the_queue_dies_with_whoever_started_it(contract, tmp_path):
    script = tmp_path / "starter.py"
    script.write_text(
        textwrap.dedent("""
        import json, signal, sys
        from meshy.columns import Contract
        from meshy.queue.local import local_queue
        with local_queue(Contract.from_json(json.loads(sys.argv[1]))) as queue:
            print(queue.processes["controller"].pid, flush=True)
            signal.pause()
        """)
    )
    starter = subprocess.Popen(
        [sys.executable, str(script), json.dumps(contract.to_json())], stdout=subprocess.PIPE, text=True
    )
    parent = psutil.Process(int(starter.stdout.readline()))
    processes = [parent, *parent.children()]
    assert len(processes) == 3
    starter.kill()
    starter.wait()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


def test_a_taken_port_is_named(queue, contract, tmp_path):
    (tmp_path / "e.json").write_text(json.dumps(queue.endpoints.to_json()))
    (tmp_path / "c.json").write_text(json.dumps(contract.to_json()))
    again = subprocess.run(
        [sys.executable, "-m", "meshy.queue.server", "controller"]  # noqa: RUF005
        + ["--endpoints", tmp_path / "e.json", "--contract", tmp_path / "c.json"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert again.returncode != 0
    assert str(queue.endpoints.controller.handshake) in again.stderr and "in use" in again.stderr


def test_no_ray_and_no_tensordict_stand_ins_stay_behind():
    code = """
import sys
import meshy.queue.controller, meshy.queue.storage, meshy.queue.sync
left = [name for name in sys.modules if name.split('.')[0] in ('ray', 'tensordict')]
assert not left, left
import importlib.util
assert importlib.util.find_spec("ray") is None
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_client_that_was_stopped_for_longer_than_its_deadline_finds_its_answer(queue, contract):
    """As after SIGSTOP: nothing of it ran meanwhile, and the answer lies there."""

    async def stop():
        async with AsyncQueueClient(queue.endpoints, contract, "scorer.0", deadline=2.0) as scorer:
            asked = asyncio.create_task(scorer.table())
            await asyncio.sleep(0)  # it is on its way
            time.sleep(3.0)
            return await asked

    assert "rows0" in asyncio.run(stop())
