"""A real queue on free ports of this machine, for tests and tools.

with local_queue(contract) as queue, QueueClient(queue.endpoints, contract, "trainer.0") as client:
    ...
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from meshy.columns import Contract
from meshy.queue.admin import wait_until_ready
from meshy.queue.endpoints import CONTROLLER_PORTS, ControllerEndpoint, Endpoints, StorageEndpoint
from meshy.topology import FIRST_BASE_PORT, LOWEST_PORT

HOST = "127.0.0.1"


@dataclass(frozen=True)
class LocalQueue:
    """endpoints: for the clients. processes: the started process of each role (the same one for all, unless apart)."""

    endpoints: Endpoints
    processes: dict[str, subprocess.Popen[bytes]]
    log: Path

    def kill(self, role: str) -> None:
        """SIGKILL one role's process, as a crash does. Only for queues whose processes were started apart."""
        self.processes[role].send_signal(signal.SIGKILL)
        self.processes[role].wait()


@contextmanager
def local_queue(
    contract: Contract, storage_units: int = 1, apart: bool = False, deadline: float = 60.0
) -> Iterator[LocalQueue]:
    """Start a queue, wait until it serves, and end it afterwards.

    apart: start each process by itself, so that one can be killed; costs an import each. Raises RuntimeError with the
    log if a process dies at the start, TimeoutError after `deadline` seconds.
    """
    endpoints = free_endpoints(storage_units)
    with tempfile.TemporaryDirectory(prefix="meshy-queue-") as folder:
        files = Path(folder)
        (files / "endpoints.json").write_text(json.dumps(endpoints.to_json()))
        (files / "contract.json").write_text(json.dumps(contract.to_json()))
        log = files / "log"
        processes: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for roles in [[role] for role in endpoints.roles] if apart else [endpoints.roles]:
                process = _start(files, log, roles)
                processes |= dict.fromkeys(roles, process)

            def check() -> None:
                if any(process.poll() is not None for process in processes.values()):
                    raise RuntimeError(f"the queue did not start:\n{log.read_text()}")

            wait_until_ready(endpoints, deadline, check)
            yield LocalQueue(endpoints, processes, log)
        finally:
            for process in processes.values():
                process.terminate()
            for process in processes.values():
                process.wait(10)


def _start(files: Path, log: Path, roles: list[str] | tuple[str, ...]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "meshy.queue.server", *roles]
    command += ["--endpoints", str(files / "endpoints.json"), "--contract", str(files / "contract.json")]
    with log.open("ab") as stream:
        return subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )


def free_ports(count: int) -> list[int]:
    """Ports of this machine on which nobody listens now. They lie below those that connections are given, or one of
    them might be taken by any program before it is used, and below those of runs."""
    ports: list[int] = []
    with ExitStack() as held:
        while len(ports) < count:
            port = random.SystemRandom().randrange(LOWEST_PORT, FIRST_BASE_PORT)
            with suppress(OSError):
                held.enter_context(socket.create_server((HOST, port)))
                ports.append(port)
    return ports


def free_endpoints(storage_units: int = 1) -> Endpoints:
    """Endpoints of a new run on ports that are free now."""
    ports = free_ports(len(CONTROLLER_PORTS) + storage_units)
    controller = dict(zip(CONTROLLER_PORTS, ports, strict=False))
    return Endpoints(
        controller=ControllerEndpoint(host=HOST, **controller),
        storage=tuple(StorageEndpoint(host=HOST, request=port) for port in ports[len(CONTROLLER_PORTS) :]),
        run_id=f"local-{uuid.uuid4().hex[:8]}",
    )
