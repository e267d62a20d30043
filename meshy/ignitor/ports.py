"""Trying the run's ports on this host before anything is spawned, and holding the block for as long as it lives."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import psutil


class PortBlock:
    """The run's claim on a block of ports of this host: its first port, bound and held.

    Two runs that start at the same moment meet at that port, and only one gets it; so their blocks never overlap.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._held: socket.socket | None = None

    def claim(self, ports: Mapping[int, str]) -> list[str]:
        """Hold the lowest of `ports` (port -> owner) and try the rest. Returns a fault for each that is taken."""
        self.release()
        first = min(ports)
        faults = []
        for port, owner in sorted(ports.items()):
            trial = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((self._host, port))
                trial.listen(1)
            except OSError as error:
                faults.append(
                    f"port {port} on {self._host}, meant for {owner}, cannot be had ({error.strerror}): "
                    f"{holder(port)}; end that process, or set base_port to another block"
                )
                trial.close()
                continue
            if port == first:
                self._held = trial
            else:
                trial.close()
        if faults:
            self.release()
        return faults

    def release(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


def holder(port: int) -> str:
    """Who listens on a TCP port of this host, in words."""
    try:
        pids = [
            c.pid
            for c in psutil.net_connections("tcp")
            if c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN
        ]
    except psutil.AccessDenied:
        return "its holder cannot be seen by this user"
    for pid in pids:
        if pid:
            try:
                command = " ".join(psutil.Process(pid).cmdline())[:120]
            except psutil.Error:
                continue
            return f"it is held by process {pid} ({command})"
    return "nobody listens on it, but it is not free (a connection may still be closing)"
