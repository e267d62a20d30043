import json
import os
import re
import subprocess
import sys
import textwrap
import time

import pytest

from meshy.observe.jsonl import JsonlWriter
from meshy.observe.queue_table import depth, ready_by_count
from meshy.observe.runfolder import RunFolder, write_json
from meshy.observe.status import look, status
from meshy.observe.summary import build_summary

TABLE = {
    "train": {
        "rows": 64,
        "capacity": 512,
        "columns": {"uid": 64, "tokens": 64, "reward": 52},
        "consumers": {"trainer": {"end": True, "taken": 0, "ready": 52, "waiting": 12, "missing": {"reward": 12}}},
    },
    "eval": {"rows": 0, "capacity": 8, "columns": {"uid": 0}, "consumers": {}},
}

SERVER = """
    import json, sys
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    answers = json.loads(sys.argv[1])
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments): pass
        def do_GET(self):
            code, body = answers[self.path]
            self.send_response(code); self.end_headers(); self.wfile.write(json.dumps(body).encode())
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
"""


@pytest.fixture
def serve():
    """Starts processes that answer as an admin endpoint does; gives their ports."""
    processes = []

    def start(**answers):
        arguments = [
            sys.executable,
            "-c",
            textwrap.dedent(SERVER),
            json.dumps({f"/{k}": v for k, v in answers.items()}),
        ]
        processes.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True))
        return int(processes[-1].stdout.readline())

    yield start
    for process in processes:
        process.kill()
        process.wait()


def health(name, state="ready", run_id="r1", **more):
    return [200 if state == "ready" else 503, {"service": name, "state": state, "run_id": run_id, "pid": 7, **more}]


def make_run(path, ports, queue_port):
    folder = RunFolder.create("x", run_dir=path)
    services = [
        {"name": name, "group": name.split(".")[0], "host": "127.0.0.1", "gpus": [], "admin_port": port}
        for name, port in ports.items()
    ]
    queue = {"controller": {"host": "127.0.0.1", "ports": [1, 2, 3, queue_port]}}
    write_json(folder.topology, {"run_id": "r1", "services": services, "queue": queue})
    write_json(folder.recipe, {"steps": 40})
    return folder


def add_step(folder, step=14):
    with JsonlWriter(folder.metrics) as metrics:
        metrics.write({"step": step, "reward_mean": 0.6, "step_seconds": 2, "ended": time.time()})


@pytest.fixture
def run(tmp_path, serve):
    ports = {
        "inference.0": serve(health=health("inference.0", since=time.time() - 65)),
        "trainer.0": serve(health=health("trainer.0", "waiting", detail="for inference")),
        "logger.0": serve(health=health("logger.0", run_id="r2")),
        "teacher.0": 1,
    }
    queue = serve(
        health=[200, {"state": "ready", "run_id": "r1", "since": 1.0, "pid": 1, "detail": ""}], table=[200, TABLE]
    )
    folder = make_run(tmp_path / "run", ports, queue)
    add_step(folder)
    return folder


def test_everybody_is_asked(run, monkeypatch, capfd):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # a proxy must not stand in between
    seen = look(run)
    assert {service.name: service.state for service in seen.services} == {
        "queue.controller": "ready",
        "inference.0": "ready",
        "trainer.0": "waiting",
        "logger.0": "foreign",
        "teacher.0": "silent",
    }
    assert (seen.state, seen.steps, seen.step["step"], seen.queue) == ("running", 40, 14, TABLE)
    assert status(run.path) == 0
    text = capfd.readouterr().out
    assert "\x1b" not in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for line in (
        f"run {run.path} running",
        "train 64 of 512 64 uid, tokens",
        "52 reward",
        "trainer train 52 12 reward (12)",
        "inference.0 127.0.0.1 - 7",
        "teacher.0 127.0.0.1 - - 1 silent - nothing listens on 127.0.0.1:1 (connection refused)",
    ):
        assert any(found.startswith(line) for found in lines), line
    assert any("waiting - for inference" in line for line in lines)
    assert any("foreign - run r2 answers on" in line for line in lines)
    assert any(re.search(r"ready 1:\d\d", line) for line in lines)


def test_json(run, capfd):
    assert status(run.path, as_json=True) == 0
    (line,) = capfd.readouterr().out.splitlines()
    seen = json.loads(line)
    assert seen["queue"]["train"]["columns"]["reward"] == 52 and seen["services"][1]["state"] == "ready"


def test_a_silent_host_costs_one_deadline(tmp_path):
    """A port that accepts and never answers, many times over: all are asked at once."""
    import socket

    with socket.create_server(("127.0.0.1", 0), backlog=64) as hanging:
        port = hanging.getsockname()[1]
        folder = make_run(tmp_path / "run", {f"s.{index}": port for index in range(30)}, port)
        started = time.monotonic()
        seen = look(folder, deadline=0.5)
    assert time.monotonic() - started < 10  # 30 deadlines one after the other would be 15 s
    assert {service.detail for service in seen.services} == {f"no answer from 127.0.0.1:{port} in 0.5 s"}


def test_states_of_a_run_that_does_not_answer(tmp_path):
    folder = make_run(tmp_path / "run", {"trainer.0": 1}, 1)
    assert look(folder).state == "starting"
    for path in (folder.topology, folder.path, folder.logs):
        os.utime(path, (1, 1))
    assert look(folder).state == "lost"
    add_step(folder)
    assert look(folder).state == "lost"


def test_another_runs_queue_is_not_shown(tmp_path, serve):
    queue = serve(health=[200, {"run_id": "r2"}], table=[200, TABLE])
    assert look(make_run(tmp_path / "run", {}, queue)).queue is None


def test_a_finished_run(run, capfd):
    build_summary(run, status="finished", started=0, ended=90)
    assert status(run.path, watch=True) == 0
    text = capfd.readouterr().out
    assert "finished" in text and "wall time           1:30" in text and "silent" not in text
    assert look(run).state == "finished"


def test_watch_ends_with_the_run_and_with_its_reader(run):
    arguments = [sys.executable, "-m", "meshy.cli", "status", str(run.path), "--watch", "--json"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert json.loads(process.stdout.readline())["state"] == "running"
    build_summary(run, status="failed", started=0, ended=90)
    states = [json.loads(line)["state"] for line in process.stdout]
    assert states[-1] == "failed" and process.wait(30) == 0
    run.summary.unlink()
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(30) == 0


def test_what_is_not_a_run_is_refused(tmp_path, capsys):
    assert status(tmp_path / "nothing") == 2
    assert "there is no run folder" in capsys.readouterr().err
    assert status(tmp_path) == 2
    assert "is not a run folder" in capsys.readouterr().err
    folder = make_run(tmp_path / "run", {}, 1)
    folder.topology.write_text("{broken")
    assert status(folder.path) == 2
    assert "topology.json is not JSON" in capsys.readouterr().err


def test_very_many_services(tmp_path, capfd):
    ports = {f"trainer.0.rank{index}": 1 for index in range(2000)}
    assert status(make_run(tmp_path / "run", ports, 1).path) == 0
    text = capfd.readouterr().out
    assert "... 1961 more" in text and len(text.splitlines()) < 60


def test_depth_and_counts():
    assert depth(TABLE) == "64 rows, 12 wait for reward" and depth({}) is None
    assert ready_by_count({"a": 3, "b": 1, "c": 3}) == [(3, ["a", "c"]), (1, ["b"])]
