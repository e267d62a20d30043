"""The queue over HTTP, for people and for the ignitor: GET /health and GET /table on the controller's admin port."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from meshy.observe.ask import ask_json
from meshy.queue.endpoints import Endpoints, storage_role

READY_POLL_SECONDS = 0.05


def serve_admin(endpoints: Endpoints, table: Callable[[], dict[str, Any]]) -> ThreadingHTTPServer:
    """Answer in threads of this process: /health with 503 until every storage unit accepts connections, /table."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/health":
                silent = silent_units(endpoints)
                self._reply(503 if silent else 200, health(silent))
            elif self.path == "/table":
                self._reply(200, table())
            else:
                self._reply(404, {"error": f"no {self.path}; there are /health and /table"})

        def _reply(self, status: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not worth a line each."""

    since = time.time()

    def health(silent: list[str]) -> dict[str, Any]:
        """As services answer it."""
        return {
            "service": "queue",
            "run_id": endpoints.run_id,
            "pid": os.getpid(),
            "state": "starting" if silent else "ready",
            "since": since,
            "detail": f"no answer from {', '.join(silent)}" if silent else "",
        }

    server = ThreadingHTTPServer((endpoints.controller.host, endpoints.controller.admin), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 60.0}, name="admin", daemon=True).start()
    return server


def silent_units(endpoints: Endpoints) -> list[str]:
    """Storage units that accept no connection."""
    silent = []
    for unit, endpoint in enumerate(endpoints.storage):
        try:
            socket.create_connection((endpoint.host, endpoint.request), timeout=1.0).close()
        except OSError:
            silent.append(storage_role(unit))
    return silent


def wait_until_ready(endpoints: Endpoints, deadline: float, check: Callable[[], None] = lambda: None) -> None:
    """Return once the whole queue of this run serves. `check` is called between looks and may raise (a process died).

    Raises TimeoutError after `deadline` seconds, saying what is missing.
    """
    give_up = time.monotonic() + deadline
    why = "nothing was tried"
    while time.monotonic() < give_up:
        check()
        try:
            status, health = ask_json(endpoints.controller.host, endpoints.controller.admin, "/health", deadline=2.0)
            if health["run_id"] != endpoints.run_id:
                why = f"it serves run {health['run_id']!r}"
            elif status == 200:
                return
            else:
                why = health["detail"]
        except (OSError, ValueError) as error:
            why = str(error)
        time.sleep(READY_POLL_SECONDS)  # another process's socket: there is no event to await
    raise TimeoutError(f"the queue at {endpoints.controller.admin_url} is not ready after {deadline:g} s: {why}")
