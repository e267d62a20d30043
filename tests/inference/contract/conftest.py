"""The same small model, served by the embedded engine and by real SGLang; tests that take `served` run on both."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from meshy.inference.model_config import read_model_config
from meshy.inference.sglang.arguments import ServerPlan
from meshy.inference.sglang.interpreter import interpreter
from meshy.inference.sglang.server import SglangServer
from tests.inference.contract.served import CONTEXT, RUNNING, Served
from tests.inference.models import build, serve

SHAPE = "qwen3_grouped_untied"
HOST = "127.0.0.1"
STARTUP_DEADLINE = 150.0
SGLANG = pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.timeout(300)])


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape with different weights."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("contract")
    return build(root / "one", SHAPE, 0, 2 * CONTEXT), build(root / "other", SHAPE, 1, 2 * CONTEXT)


@contextmanager
def sglang(folder: Path, **options) -> Iterator[SglangServer]:
    """A real SGLang server, ready."""
    with socket.socket() as one, socket.socket() as two:
        one.bind((HOST, 0))
        two.bind((HOST, 0))
        port, meeting = one.getsockname()[1], two.getsockname()[1]
    plan = ServerPlan(
        python=interpreter(None),
        model=read_model_config(folder),
        host=HOST,
        rendezvous=f"{HOST}:{meeting}",
        on_gpu=False,
        max_running_requests=RUNNING,
        weight_version=0,
        random_seed=0,
        **{"port": port, "dtype": "auto", "context_length": CONTEXT, **options},
    )
    server = SglangServer(plan)
    try:
        server.start()
        server.wait_ready(STARTUP_DEADLINE)
        yield server
    finally:
        started = psutil.Process(server.pid).children(recursive=True) if server.alive else []
        server.close()
        assert not [one for one in started if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="session")
def embedded_engine(folders: tuple[Path, Path]) -> Iterator[Served]:
    arguments = ("--context-length", str(CONTEXT), "--max-running-requests", str(RUNNING))
    with serve(folders[0], *arguments) as (url, _):
        yield Served("embedded", url, *folders, limit=CONTEXT)


@pytest.fixture(scope="session")
def sglang_engine(folders: tuple[Path, Path]) -> Iterator[Served]:
    with sglang(folders[0]) as server:
        yield Served("sglang", f"http://{HOST}:{server.plan.port}", *folders, limit=server.plan.served_context)


@contextmanager
def left_as_found(engine: Served) -> Iterator[Served]:
    """Tests share an engine: each finds it unpaused, idle, with its first weights as version 0."""
    yield engine
    engine.call("/abort_request", {"abort_all": True})
    engine.go_on()
    if engine.version != "0":
        engine.restore()


@pytest.fixture(params=["embedded", SGLANG])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Each engine in turn."""
    with left_as_found(request.getfixturevalue(f"{request.param}_engine")) as engine:
        yield engine


@pytest.fixture
def real(sglang_engine: Served) -> Iterator[Served]:
    """SGLang alone."""
    with left_as_found(sglang_engine) as engine:
        yield engine
