"""A real SGLang server, for tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from meshy.inference.model_config import read_model_config
from meshy.inference.sglang.arguments import ServerPlan
from meshy.inference.sglang.interpreter import interpreter
from meshy.inference.sglang.server import SglangServer
from meshy.queue.local import free_ports

HOST = "127.0.0.1"
STARTUP_DEADLINE = 150.0


@contextmanager
def sglang(folder: Path, ports: Sequence[int] | None = None, **plan: Any) -> Iterator[SglangServer]:
    """Ready; none of its processes is left in the end. plan: more fields of ServerPlan."""
    port, meeting = ports or free_ports(2)
    defaults = {"dtype": "auto", "context_length": 256, "max_running_requests": 8}
    server = SglangServer(
        ServerPlan(
            python=interpreter(None),
            model=read_model_config(folder),
            host=HOST,
            port=port,
            rendezvous=f"{HOST}:{meeting}",
            on_gpu=False,
            weight_version=0,
            random_seed=0,
            **{**defaults, **plan},
        )
    )
    try:
        server.start()
        server.wait_ready(STARTUP_DEADLINE)
        yield server
    finally:
        started = psutil.Process(server.pid).children(recursive=True) if server.alive else []
        server.close()
        assert not [one for one in started if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
