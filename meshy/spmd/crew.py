"""The leader's line to its crew: commands go down it, and either end notices at once when the other is gone.

A collective that waits for a dead rank may wait for minutes, and on some backends for ever. The line is a plain TCP
connection from every rank to rank 0, watched by a thread: whatever the main thread is stuck in, a lost or failed rank
takes the whole replica down, with its own words.
"""

import logging
import os
import pickle
import queue
import secrets
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

log = logging.getLogger(__name__)

MEETING_SECONDS = 60.0  # within which every rank connects; all have met already when the line is laid
WATCHDOG_SECONDS = 60.0  # of waiting for the others, then a line in the log says for whom
ECHO_SECONDS = 2.0  # in which a rank that fails listens whether another one was lost before it
LOST = 70  # exit status of a process that ends because another rank of its replica is gone


class Store(Protocol):
    """A key-value store that the ranks share, such as torch's TCPStore."""

    def set(self, key: str, value: str) -> Any: ...

    def get(self, key: str) -> bytes: ...


class Crew:
    """One per process. `send` and `wait_for_all` on rank 0, `receive` and `confirm` on the others.

    on_aside: called in the watching thread with what `send_aside` has sent; it must be quick. If it raises, this rank
    has failed.
    on_loss: called in the watching thread with what happened to a rank that failed or vanished; by default it says so
    and ends this process with status 70.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        host: str,
        store: Store,
        on_aside: Callable[[Any], None] = lambda order: None,
        on_loss: Callable[[str], None] | None = None,
    ) -> None:
        self.rank = rank
        self._on_aside = on_aside
        self._on_loss = on_loss or end_process
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._sockets: dict[int, socket.socket] = {}
        self._sending = threading.Lock()
        self._ending = threading.Event()
        self._loss = threading.Event()
        if world_size > 1:
            self._sockets = _gather(world_size, host, store) if rank == 0 else {0: _join(rank, store)}
        for other, connection in self._sockets.items():
            name = f"line to rank {other}"
            threading.Thread(target=self._watch, args=(other, connection), name=name, daemon=True).start()

    def send(self, command: Any) -> None:
        """Rank 0: a small picklable object for every other rank."""
        self._tell(("command", command))

    def send_aside(self, order: Any) -> None:
        """Rank 0: a small picklable object for every other rank at once, whatever it is busy with."""
        self._tell(("aside", order))

    def receive(self) -> Any:
        """Other ranks: wait for the next command. A signal handler can interrupt the wait."""
        return self._inbox.get()

    def confirm(self) -> None:
        """Other ranks: tell rank 0 that its last command is carried out."""
        self._tell(("done", self.rank))

    def wait_for_all(self, what: str) -> None:
        """Rank 0: until every other rank has confirmed once more, however long it takes; one that fails meanwhile ends
        this process. what: it is that they do, for the log."""
        began, missing = time.monotonic(), set(self._sockets)
        while missing:
            try:
                missing.remove(self._done.get(timeout=WATCHDOG_SECONDS))
            except queue.Empty:
                ranks = ", ".join(str(rank) for rank in sorted(missing))
                log.warning("waiting %.0f s for ranks %s to %s", time.monotonic() - began, ranks, what)

    def fail(self, why: str) -> None:
        """This rank has failed: every other rank ends, saying why.

        A collective raises, too, where another rank has died: so it first listens for a moment, and if there was such a
        loss, that is the reason that all give.
        """
        if self._ending.is_set() or (self._sockets and self._loss.wait(ECHO_SECONDS)):
            return
        self._fail(why)

    def _fail(self, why: str) -> None:
        self._ending.set()
        self._tell(("failed", f"rank {self.rank} failed: {why}"))

    def close(self) -> None:
        """An orderly end of this process: its silence from now on is no failure."""
        if self._ending.is_set():
            return
        self._ending.set()
        self._tell(("bye", None))

    def _tell(self, message: tuple[str, Any], but: int | None = None) -> None:
        data = pickle.dumps(message)
        with self._sending:
            for other, connection in self._sockets.items():
                if other == but:
                    continue
                try:
                    connection.sendall(struct.pack("!I", len(data)) + data)
                except OSError as error:
                    if not self._ending.is_set():
                        self._on_loss(f"rank {other} cannot be reached ({error})")

    def _watch(self, other: int, connection: socket.socket) -> None:
        while True:
            try:
                kind, content = pickle.loads(_read(connection, struct.unpack("!I", _read(connection, 4))[0]))
            except Exception as error:  # noqa: BLE001 - whatever it is, nobody can wait on this line any more
                if not self._ending.is_set():
                    self._lost(other, f"rank {other} is gone ({type(error).__name__}: {error})")
                return
            if kind == "command":
                self._inbox.put(content)
            elif kind == "aside":
                try:
                    self._on_aside(content)
                except Exception:  # noqa: BLE001 - with this thread gone nobody would watch the line
                    return self._failed_aside(traceback.format_exc())
            elif kind == "done":
                self._done.put(other)
            elif kind == "failed":
                return self._lost(other, content)
            else:
                return None

    def _failed_aside(self, why: str) -> None:
        """The main thread may be stuck in a collective, so it is not the one to end this process."""
        self._fail(why)
        self._on_loss(f"rank {self.rank} failed: {why}")

    def _lost(self, other: int, why: str) -> None:
        """Rank 0 passes the news on, so that everybody gives the same reason."""
        self._loss.set()
        if self.rank == 0:
            self._ending.set()
            self._tell(("failed", why), but=other)
        self._on_loss(why)


def end_process(why: str) -> None:
    """Says why and ends this process at once: its main thread may be stuck where no exception reaches it."""
    log.critical("%s; this rank ends too", why)
    logging.shutdown()
    os._exit(LOST)


def _gather(world_size: int, host: str, store: Store) -> dict[int, socket.socket]:
    """Rank 0: every other rank's connection. A secret in the store keeps strangers off the line."""
    secret = secrets.token_hex(16)
    with socket.create_server((host, 0), backlog=world_size) as server:
        server.settimeout(MEETING_SECONDS)
        store.set("crew", f"{host} {server.getsockname()[1]} {secret}")
        connections: dict[int, socket.socket] = {}
        while len(connections) < world_size - 1:
            connection, address = server.accept()
            try:
                connection.settimeout(10)
                presented, rank = _read(connection, len(secret)).decode(), struct.unpack("!I", _read(connection, 4))[0]
            except (OSError, UnicodeDecodeError) as error:
                log.warning("a stranger at %s on the crew's line: %s", address, error)
                connection.close()
                continue
            if not secrets.compare_digest(presented, secret):
                log.warning("a stranger at %s on the crew's line: wrong secret", address)
                connection.close()
                continue
            connections[rank] = _prepared(connection)
    return connections


def _join(rank: int, store: Store) -> socket.socket:
    host, port, secret = store.get("crew").decode().split()
    connection = socket.create_connection((host, int(port)), timeout=MEETING_SECONDS)
    connection.sendall(secret.encode() + struct.pack("!I", rank))
    return _prepared(connection)


def _prepared(connection: socket.socket) -> socket.socket:
    """No delay for small messages; a host that vanishes without a word is noticed within about 25 s."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection


def _read(connection: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes; ConnectionError if the other end closes before."""
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return bytes(data)
