"""The admin endpoint of a service: `/health` (503 until ready), `/metrics` (Prometheus text), and the role's own."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse

from meshy.listening import listen

if TYPE_CHECKING:
    from meshy.service.base import Service


class AdminServer:
    """Serves the admin endpoint from a thread of its own, so that it answers whatever the service is busy with."""

    def __init__(self, service: Service, host: str, port: int) -> None:
        self._server = uvicorn.Server(
            uvicorn.Config(admin_app(service), log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        )
        self._socket = listen(host, port)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="admin", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=2)
        self._socket.close()


def admin_app(service: Service) -> FastAPI:
    app = FastAPI(title=service.context.name, openapi_url=None)

    @app.get("/health")
    def health() -> JSONResponse:
        return JSONResponse(health_of(service), status_code=200 if service.state == "ready" else 503)

    @app.get("/metrics")
    def metrics() -> PlainTextResponse:
        numbers = service.metrics() | (service.ring.metrics() if service.ring is not None else {})
        label = f'{{service="{service.context.name}"}}'
        lines = [f"meshy_{name.replace('/', '_')}{label} {value}" for name, value in numbers.items()]
        return PlainTextResponse("\n".join([*lines, ""]))

    service.admin_routes(app)
    return app


def health_of(service: Service) -> dict:
    """What `/health` answers: identity and state, and what the role adds."""
    return {
        "service": service.context.name,
        "run_id": service.context.run_id,
        "pid": os.getpid(),
        "state": service.state,
        "since": service.since,
        "detail": service.detail or (service.ring.waiting if service.ring is not None else ""),
        **(service.ring.health() if service.ring is not None else {}),
        **service.health(),
    }
