"""Sockets that services answer on."""

from __future__ import annotations

import socket


def listen(host: str, port: int, backlog: int = 128) -> socket.socket:
    """A listening TCP socket (port 0: any that is free); OSError names the address where it cannot be had."""
    # The protocol is named because asyncio turns Nagle's delay (40 ms an answer) off only where it is.
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host, port))
    except OSError as error:
        server.close()
        raise OSError(
            error.errno, f"cannot listen on {host}:{port} ({error.strerror}); set base_port to another block of ports"
        ) from error
    server.listen(backlog)
    return server
