"""One pool of HTTP connections, and what counts as worth another try."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

# Servers close a connection that is idle for 5 s (uvicorn's default, SGLang's too); one that is reused just then fails.
KEEP_ALIVE_SECONDS = 4.0
HEADERS = {"content-type": "application/json"}


class Unavailable(RuntimeError):
    """The server could not be reached, broke off, or said that it cannot serve now; another try may succeed."""


class Refused(RuntimeError):
    """The server refused the request as it is; another try would be refused too."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Transport:
    """JSON over pooled connections. They are made on first use, since they belong to the running event loop. headers:
    that go with every request."""

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        self._headers = {**HEADERS, **(headers or {})}
        self._session: aiohttp.ClientSession | None = None

    async def request(self, method: str, url: str, body: Any, timeout: float | None) -> Any:
        """The decoded answer (None if empty, text if not JSON). timeout: seconds; None where the caller has set one.
        Raises Unavailable or Refused."""
        try:
            async with asyncio.timeout(timeout):
                status, content_type, data = await self._exchange(method, url, body)
        except TimeoutError as error:
            raise Unavailable(f"{url} did not answer within {timeout:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{url} could not be reached: {type(error).__name__}: {error}") from error
        try:
            value = orjson.loads(data) if data and content_type == "application/json" else data.decode() or None
        except ValueError as error:  # cut off, or not what it says it is
            raise Unavailable(f"{url} gave an answer that cannot be read: {error}") from error
        if status >= 500:
            raise Unavailable(f"{url} answered {status}: {message_of(value)}")
        if status >= 400:
            raise Refused(f"{url} answered {status}: {message_of(value)}", status)
        return value

    async def _exchange(self, method: str, url: str, body: Any) -> tuple[int, str, bytes]:
        if self._session is None:
            # A limit here would queue requests unseen; the client bounds what is in flight itself.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        data = None if body is None else orjson.dumps(body)
        async with self._session.request(method, url, data=data, headers=self._headers) as response:
            return response.status, response.content_type, await response.read()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def message_of(value: Any) -> str:
    """The server's own words, from the shapes that SGLang uses for errors."""
    if isinstance(value, dict):
        inner = value.get("error")
        if isinstance(inner, dict):
            return str(inner.get("message", inner))
        for name in ("message", "detail"):
            if name in value:
                return str(value[name])
    return str(value).strip()
