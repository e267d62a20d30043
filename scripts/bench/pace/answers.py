"""JSON in and out of the sleeping engine's routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

Handler = Callable[[dict[str, Any]], Awaitable[web.Response]]


def with_json(handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
    """The handler gets the JSON body; what it cannot make sense of is answered 400."""

    async def handle(request: web.Request) -> web.Response:
        raw = await request.read()
        try:
            return await handler(orjson.loads(raw) if raw else {})
        except (KeyError, TypeError, ValueError) as error:
            return as_json({"message": f"{request.path}: {type(error).__name__}: {error}"}, 400)

    return handle


def as_json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")
