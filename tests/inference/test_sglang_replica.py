"""A replica that runs real SGLang: it serves, reports, and leaves nothing behind, however it ends."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from meshy.inference.sglang.server import SglangFailure
from meshy.observe.jsonl import read_jsonl
from meshy.queue.local import free_ports
from tests.inference.models import call
from tests.inference.real_sglang import sglang
from tests.inference.replica import replica_process
from tests.inference.test_protocol import until

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

READY = 150.0
LONG = {"max_new_tokens": 120, "ignore_eos": True}


def test_a_replica_serves_reports_and_ends_with_its_scheduler(tmp_path: Path):
    with replica_process(tmp_path / "run", inference__engine="sglang", inference__dtype="bfloat16") as replica:
        replica.wait_ready(READY)
        info = call(replica.url, "/server_info")[2]
        assert info["dtype"] == "bfloat16" and info["nccl_port"] == replica.replica.distributed_port
        body = {"input_ids": [5, 6, 7], "sampling_params": LONG, "return_logprob": True}
        written = call(replica.url, "/generate", body)[2]
        assert written["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 120}]
        health = replica.health()
        assert health["engine"] == "sglang" and health["engine_reason"] == "the recipe names it"
        assert health["weight_version"] == "0" and health["server_pid"] != replica.process.pid
        assert replica.metrics().keys() >= {"meshy_running", "meshy_queued", "meshy_weight_version"}
        server = psutil.Process(health["server_pid"])
        assert not [name for name in server.environ() if name.startswith("TORCHELASTIC") or name == "RANK"]
        assert "texts will differ from run to run" in replica.log  # the recipe is deterministic

        body["sampling_params"] = {**LONG, "n": 64}
        threading.Thread(target=_until_it_breaks, args=(replica.url, body), daemon=True).start()
        timeline = replica.folder.timeline_of("inference.0")
        until(lambda: any(row["name"] == "decode" for row in read_jsonl(timeline)), "the timeline to tell of work")
        next(p for p in replica.remember() if "scheduler" in " ".join(p.cmdline())).kill()
        assert replica.process.wait(30) not in (0, 143)
        assert replica.left_after(5) == []
        assert "SglangFailure: SGLang's server" in replica.log and "was killed by SIGKILL" in replica.log
        assert "crashed with exit code -9" in replica.log.partition("SglangFailure")[2]


def _until_it_breaks(url: str, body: dict) -> None:
    try:
        while True:
            call(url, "/generate", body)
    except OSError:
        return  # the connection ends with the server


def test_a_replica_that_is_killed_takes_its_server_along(tmp_path: Path):
    with replica_process(tmp_path / "run", inference__engine="sglang") as replica:
        replica.wait_ready(READY)
        assert len(replica.remember()) >= 3
        os.kill(replica.process.pid, signal.SIGKILL)
        assert replica.left_after(5) == []


def test_a_model_that_cannot_be_loaded_comes_with_the_servers_words(folder: Path, tmp_path: Path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:7].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SglangFailure) as caught, sglang(tmp_path, context_length=128):
        pass
    words = str(caught.value)
    assert "Traceback (most recent call last)" in words and "Its last lines:" in words
    assert "load" in words


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(folder: Path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        with (
            pytest.raises(OSError, match="cannot listen on"),
            sglang(folder, (holder.getsockname()[1], free_ports(1)[0])),
        ):
            pass
