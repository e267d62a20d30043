"""The same small model, served by the embedded engine and by real SGLang; tests that take `served` run on both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.inference.contract.served import CONTEXT, RUNNING, Served
from tests.inference.models import build, serve
from tests.inference.real_sglang import HOST, sglang

SHAPE = "qwen3_grouped_untied"
SGLANG = pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.timeout(300)])


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape with different weights."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("contract")
    return build(root / "one", SHAPE, 0, 2 * CONTEXT), build(root / "other", SHAPE, 1, 2 * CONTEXT)


@pytest.fixture(scope="session")
def embedded_engine(folders: tuple[Path, Path]) -> Iterator[Served]:
    arguments = ("--context-length", str(CONTEXT), "--max-running-requests", str(RUNNING))
    with serve(folders[0], *arguments) as (url, _):
        yield Served("embedded", url, *folders, limit=CONTEXT)


@pytest.fixture(scope="session")
def sglang_engine(folders: tuple[Path, Path]) -> Iterator[Served]:
    with sglang(folders[0], context_length=CONTEXT, max_running_requests=RUNNING) as server:
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
