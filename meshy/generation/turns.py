"""Waiting in line, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Those who wait for room; whoever makes room for one wakes one."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, *, first: bool = False) -> None:
        """Until it is this one's turn. first: it had its turn already, and somebody else was quicker."""
        turn = asyncio.get_running_loop().create_future()
        if first:
            self._waiting.appendleft(turn)
        else:
            self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was woken and does not use its turn
                self.wake()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def wake(self) -> None:
        """The next one's turn, if anybody waits."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def wake_all(self) -> None:
        while self._waiting:
            self.wake()
