"""A connection that holds answers up: what a client sees of a replica that is slow at one thing."""

from __future__ import annotations

import socket
import threading


class Relay:
    """Forwards every connection to a server on this host. `hold_up`: the next answer on that path never comes, though
    the server has done what it was asked."""

    def __init__(self, port: int) -> None:
        self._to = ("127.0.0.1", port)
        self._held = b""
        self._door = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._door.getsockname()[1]}"
        threading.Thread(target=self._welcome, daemon=True).start()

    def hold_up(self, path: str) -> None:
        self._held = path.encode()

    def let_pass(self) -> None:
        self._held = b""

    def close(self) -> None:
        self._door.close()

    def _welcome(self) -> None:
        while True:
            try:
                client, _ = self._door.accept()
            except OSError:  # closed
                return
            server = socket.create_connection(self._to)
            silent = threading.Event()
            for source, target, asks in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pump, args=(source, target, asks, silent), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, asks: bool, silent: threading.Event) -> None:
        """asks: it carries requests. silent: answers on this connection are dropped."""
        try:
            while data := source.recv(1 << 16):
                if asks and self._held and self._held in data:
                    silent.set()
                if asks or not silent.is_set():
                    target.sendall(data)
        except OSError:
            pass  # either side has hung up
        if asks and silent.is_set():
            return  # the server is not told that its client does not wait any more
        target.close()
