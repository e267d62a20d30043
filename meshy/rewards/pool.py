"""RewardPool: the asyncio side of the reward workers. Torch-free."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from meshy.importing import path_of
from meshy.rewards.sample import RewardResult, RewardSample
from meshy.rewards.worker import HEADER, encode

log = logging.getLogger(__name__)


class RewardError(RuntimeError):
    """The reward cannot be loaded in a worker; the message holds its traceback."""


class ConstantRewardWatch:
    """Notices a reward whose first `count` scores are all equal: usually a grader that never finds the answer."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._first: float | None = None

    def observe(self, value: float) -> bool:
        """Whether this score completes `count` equal first ones."""
        if self._left <= 0:
            return False
        if self._first is None:
            self._first = value
        self._left = self._left - 1 if value == self._first else 0
        return self._left == 0 and value == self._first


class _Worker:
    """One process and the socket to it."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls, reward: str, deadline: float) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "meshy.rewards.worker", str(theirs.fileno()), str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a kill takes the reward's own children along; Ctrl-C does not reach it
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        worker = cls(process, *await asyncio.open_connection(sock=ours))
        try:
            async with asyncio.timeout(deadline):
                error = await worker.ask({"reward": reward, "sys_path": sys.path})
        except TimeoutError as late:
            await worker.kill()
            raise RewardError(f"reward {reward}: a worker was not ready {deadline:g} s after its start") from late
        except (EOFError, ConnectionError) as gone:
            raise RewardError(f"reward {reward}: a worker died while loading it ({await worker.fate()})") from gone
        except BaseException:
            await worker.kill()
            raise
        if error is not None:
            await worker.kill()
            raise RewardError(f"reward {reward} cannot be loaded:\n{error}")
        return worker

    async def ask(self, message: Any) -> Any:
        """Send one message and await its answer. EOFError or ConnectionError if the process is gone."""
        self._writer.write(encode(message))
        await self._writer.drain()
        (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        return pickle.loads(await self._reader.readexactly(length))

    async def fate(self) -> str:
        """How the process ended, once it has."""
        await self.kill()
        code = self.process.returncode or 0
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    async def kill(self) -> None:
        """End the process and everything that it started, and reap it."""
        if self.process.returncode is None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                log.debug("reward worker %d had ended", self.process.pid)
        self._writer.close()
        await self.process.wait()


class RewardPool:
    """Scores samples in `workers` processes; each sample may take `deadline` seconds, then its worker is replaced.

    reward: import path (`package.module:name`, `path/to/file.py:name`) or a function at the top level of a module.
    start_deadline: seconds that a worker may take to start and to import the reward.
    warn_after: the first so many scores all equal give a warning that shows one sample.
    Use as an async context manager, or call `start` and `close`. One event loop only.
    """

    def __init__(
        self,
        reward: str | Callable[[RewardSample], Any],
        *,
        workers: int = 4,
        deadline: float = 30.0,
        start_deadline: float = 120.0,
        warn_after: int = 128,
    ) -> None:
        if workers < 1 or deadline <= 0:
            raise ValueError(f"a reward pool needs at least 1 worker and a deadline above 0: got {workers}, {deadline}")
        self.reward = path_of(reward)
        self._workers, self._deadline, self._start_deadline = workers, deadline, start_deadline
        self._idle: asyncio.Queue[asyncio.Task[_Worker]] = asyncio.Queue()
        self._watch = ConstantRewardWatch(warn_after)
        self._warn_after = warn_after
        self._all: set[asyncio.Task[_Worker]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start every worker. Raises RewardError with the traceback if the reward cannot be loaded."""
        tasks = [self._launch() for _ in range(self._workers)]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            await self.close()
            raise
        for task in tasks:
            self._idle.put_nowait(task)

    async def score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """A result for each sample, in order. May be called many times at once; samples wait for a free worker.

        Raises RewardError only if a worker that replaces a killed one cannot load the reward.
        """
        return await asyncio.gather(*(self._score(sample) for sample in samples))

    async def _score(self, sample: RewardSample) -> RewardResult:
        slot = await self._idle.get()
        try:
            worker = await asyncio.shield(slot)
        except BaseException:
            self._idle.put_nowait(slot)
            raise
        started = time.monotonic()
        reusable = False
        try:
            async with asyncio.timeout(self._deadline):
                value, error = await worker.ask(sample)
            reusable = True
        except TimeoutError:
            error = f"gave no score within {self._deadline:g} s; its worker was killed"
            return self._failed(sample, error, time.monotonic() - started, timed_out=True)
        except (EOFError, ConnectionError):
            return self._failed(sample, f"ended its worker ({await worker.fate()})", time.monotonic() - started)
        except (pickle.PicklingError, TypeError, AttributeError) as failure:  # raised before anything was sent
            reusable = True
            return self._failed(sample, f"cannot be given its sample, which does not pickle: {failure}", 0.0)
        finally:
            if not reusable and not self._closed:
                slot = self._replace(slot)
            self._idle.put_nowait(slot)
        seconds = time.monotonic() - started
        if value is None:
            return self._failed(sample, error, seconds)
        if self._watch.observe(value):
            log.warning(
                "reward %s: the first %d scores are all %g; does it find the answer? One of them: %s",
                *(self.reward, self._warn_after, value, sample.describe()),
            )
        return RewardResult(value=value, seconds=seconds)

    def _failed(self, sample: RewardSample, what: str, seconds: float, *, timed_out: bool = False) -> RewardResult:
        error = f"reward {self.reward} {what}\n  sample: {sample.describe()}"
        log.warning("%s", error)
        return RewardResult(value=None, error=error, seconds=seconds, timed_out=timed_out)

    def _launch(self) -> asyncio.Task[_Worker]:
        task = asyncio.create_task(_Worker.start(self.reward, self._start_deadline))
        self._all.add(task)
        return task

    def _replace(self, slot: asyncio.Task[_Worker]) -> asyncio.Task[_Worker]:
        """Kill a worker in an unknown state; another one starts meanwhile."""

        async def again() -> _Worker:
            await slot.result().kill()
            self._all.discard(slot)
            return await _Worker.start(self.reward, self._start_deadline)

        task = asyncio.create_task(again())
        self._all.add(task)
        return task

    async def close(self) -> None:
        """Kill every worker."""
        self._closed = True
        for task in self._all:
            task.cancel()
        ended = await asyncio.gather(*self._all, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in ended if isinstance(worker, _Worker)))
        self._all.clear()

    async def __aenter__(self) -> RewardPool:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
