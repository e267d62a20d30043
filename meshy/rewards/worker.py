"""One worker process: `python -m meshy.rewards.worker FD PARENT_PID`. It scores one sample at a time.

Messages on the socket FD are pickles with their length before them (8 bytes, big-endian). The first one from the pool
is a dict (`reward`, `sys_path`), answered by None or by the text of the error that loading it raised. Then, for each
RewardSample, one answer: (score, None) or (None, error text). The end of the stream ends the process.
"""

from __future__ import annotations

import pickle
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

from meshy.importing import load
from meshy.lifetime import die_with_parent
from meshy.rewards.sample import RewardSample, to_score

HEADER = struct.Struct("!Q")


def encode(message: Any) -> bytes:
    """The message as it goes over the socket."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


def score(reward: Callable[[RewardSample], Any], sample: RewardSample) -> tuple[float | None, str | None]:
    """The reward of one sample, or the text of what went wrong."""
    try:
        value = reward(sample)
    except BaseException:  # noqa: BLE001 - whatever the user's code raises (SystemExit too) is reported with its sample
        return None, f"raised\n{traceback.format_exc()}"
    try:
        return to_score(value), None
    except ValueError as error:
        return None, str(error)


def _receive(connection: socket.socket) -> Any:
    """The next message; EOFError at the end of the stream."""
    (length,) = HEADER.unpack(_receive_exactly(connection, HEADER.size))
    return pickle.loads(_receive_exactly(connection, length))


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(1 << 20, count - len(parts)))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def main() -> None:
    """Load the reward, then answer until the pool closes the socket."""
    die_with_parent(parent=int(sys.argv[2]))
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        setup = _receive(connection)
        sys.path[:] = setup["sys_path"]
        try:
            reward = load(setup["reward"])
        except BaseException:  # noqa: BLE001 - importing user code can raise anything; the pool shows it
            connection.sendall(encode(traceback.format_exc()))
            return
        connection.sendall(encode(None))
        while True:
            connection.sendall(encode(score(reward, _receive(connection))))
    except (EOFError, ConnectionError):
        return


if __name__ == "__main__":
    main()
