"""A server of chat completions that does as a test tells it, mostly wrong."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Act = Callable[[web.Request], Awaitable[web.StreamResponse]]


def says(text: Any, reason: str = "stop") -> Act:
    """A chat completion of that text, after a moment."""

    async def act(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.02)
        message = {"role": "assistant", "content": text}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": reason}]})

    return act


def answers(status: int, body: Any) -> Act:
    async def act(request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return act


def one_after_another(*acts: Act) -> Act:
    """Then the last one again and again."""
    left = deque(acts)

    async def act(request: web.Request) -> web.StreamResponse:
        return await (left.popleft() if len(left) > 1 else left[0])(request)

    return act


async def hangs(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError("nobody waits so long")


async def hangs_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@dataclass
class Oracle:
    """acts: of the next requests, one after another; then `otherwise`. by_content: what decides instead, where the text
    of the last message is known to it."""

    url: str = ""
    acts: deque[Act] = field(default_factory=deque)
    otherwise: Act = field(default_factory=lambda: says("7"))
    by_content: dict[str, Act] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        act = self.by_content.get(body["messages"][-1]["content"])
        if act is None:
            act = self.acts.popleft() if self.acts else self.otherwise
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await act(request)
        finally:
            self.running -= 1


@contextmanager
def oracle(*acts: Act) -> Iterator[Oracle]:
    """One that listens on a free port, on a thread."""
    told, loop, listens = Oracle(acts=deque(acts)), asyncio.new_event_loop(), threading.Event()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", told.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        told.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(start())
        listens.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve, name="oracle", daemon=True)
    thread.start()
    assert listens.wait(20)
    try:
        yield told
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
