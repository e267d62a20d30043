"""A lean ASGI application: paths to handlers, JSON in and out. Time spent here is taken from the engine's thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from meshy.inference.embedded.engine import EngineFailure
from meshy.inference.embedded.request import RequestError

JSON = b"application/json"

T = TypeVar("T")
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(slots=True)
class Answer:
    status: int = 200
    body: bytes = b""
    content_type: bytes | None = None
    stream: AsyncIterator[bytes] | None = None


@dataclass(slots=True)
class Call:
    """What a handler gets. `gone` returns when the client has gone away."""

    body: dict[str, Any]
    _receive: Receive

    async def gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


Handler = Callable[[Call], Awaitable[Answer]]


class MissingBody(RequestError):
    """A POST without its JSON body."""

    def __init__(self) -> None:
        super().__init__(
            "1 validation error:\n  {'type': 'missing', 'loc': ('body',), 'msg': 'Field required', 'input': None}"
        )


def as_json(value: Any, status: int = 200) -> Answer:
    return Answer(status, orjson.dumps(value), JSON)


def refusal(message: str, status: int = 400) -> Answer:
    return as_json({"error": {"message": message}}, status)


class Application:
    """Routes: (method, path) -> handler. `bodiless` POSTs need no body."""

    def __init__(self, routes: dict[tuple[str, str], Handler], bodiless: frozenset[str]) -> None:
        self._routes = routes
        self._bodiless = bodiless
        self._paths = {path for _, path in routes}

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(f"the embedded engine speaks HTTP only, not {scope['type']}")
        result = await self._answer(scope["method"], scope["path"], receive)
        headers = [] if result.content_type is None else [(b"content-type", result.content_type)]
        if result.stream is None:
            headers.append((b"content-length", str(len(result.body)).encode()))
        await send({"type": "http.response.start", "status": result.status, "headers": headers})
        if result.stream is not None:
            async for chunk in result.stream:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": result.body})

    async def _answer(self, method: str, path: str, receive: Receive) -> Answer:
        raw = await read_body(receive)
        handler = self._routes.get((method, path))
        if handler is None:
            known = path in self._paths
            return as_json({"detail": "Method Not Allowed"}, 405) if known else as_json({"detail": "Not Found"}, 404)
        try:
            body = {} if method == "GET" or path in self._bodiless else parse(raw)
            return await handler(Call(body, receive))
        except MissingBody as error:
            return as_json({"object": "error", "message": str(error)}, 400)
        except RequestError as error:
            return refusal(str(error))
        except EngineFailure as error:
            return refusal(str(error), 500)


async def read_body(receive: Receive) -> bytes:
    message = await receive()
    body: bytes = message.get("body", b"")
    while message.get("more_body"):
        message = await receive()
        body += message.get("body", b"")
    return body


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object of a POST. Raises RequestError where there is none."""
    if not body:
        raise MissingBody
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"The body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object.")
    return value


async def done(future: Future[T]) -> T:
    """The result of a call on the engine's thread. Not cancelled with the HTTP call: a command once given is done."""
    return await asyncio.shield(asyncio.wrap_future(future))
