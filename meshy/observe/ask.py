"""Asking very many admin endpoints at once: a GET over asyncio, whose cost does not grow with the number of others."""

import asyncio
import json
from typing import Any

LONGEST_ANSWER = 64 << 20


async def get_json(host: str, port: int, path: str, deadline: float) -> tuple[int, Any]:
    """The HTTP status and the JSON value that `http://host:port/path` answers with, asked without any proxy.

    Raises TimeoutError after `deadline` seconds, OSError when nothing listens or the connection breaks, ValueError
    when what comes is not HTTP with JSON.
    """
    async with asyncio.timeout(deadline):
        reader, writer = await asyncio.open_connection(host, port, limit=LONGEST_ANSWER)
        try:
            # HTTP/1.0: the answer comes in one piece and ends with the connection
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\nAccept: application/json\r\n\r\n".encode())
            answer = await reader.read(-1)
        finally:
            writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/"):
        raise ValueError(f"{host}:{port} does not speak HTTP")
    return int(words[1]), json.loads(body)


def ask_json(host: str, port: int, path: str, deadline: float) -> tuple[int, Any]:
    """`get_json` for callers without an event loop."""
    return asyncio.run(get_json(host, port, path, deadline))
