"""Real runs for tests: torchrun with real ignitors, and what is left of them."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
ROLES = "tests/ignitor/roles.py"
TAG = "MESHY_TEST_TAG"


class Launched:
    """A running torchrun. Every process that it starts, however far down, carries a tag in its environment."""

    def __init__(self, run_dir: Path, command: list[str], environment: dict[str, str], cwd: Path = ROOT):
        self.run_dir = run_dir
        self.tag = uuid.uuid4().hex
        self.status: object = None
        self.process = subprocess.Popen(
            command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, TAG: self.tag, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        )  # fmt: skip
        self._lines: list[str] = []
        self._news: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            self._news.put(line)
        self._news.put(None)

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def wait_for_line(self, text: str, deadline: float = 60.0) -> None:
        """Return once a line of the output holds `text`."""
        end = time.monotonic() + deadline
        while (left := end - time.monotonic()) > 0:
            try:
                line = self._news.get(timeout=left)
            except queue.Empty:
                break
            if line is None or text in line:
                assert line is not None, f"the run ended without saying {text!r}:\n{self.output}"
                return
        raise AssertionError(f"no line with {text!r} within {deadline} s:\n{self.output}")

    def wait(self, deadline: float = 90.0) -> int:
        try:
            return self.process.wait(deadline)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {deadline} s:\n{self.output}") from None

    def processes(self) -> list[psutil.Process]:
        """Every living process of the run."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(TAG) == self.tag and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def service(self, name: str) -> psutil.Process:
        """The process of service `name` (`reader.0`)."""
        return next(p for p in self.processes() if "meshy.service" in p.cmdline() and p.cmdline()[-1] == name)

    def left_after(self, seconds: float) -> list[str]:
        """What is still alive when `seconds` have passed, or nothing as soon as that is so."""
        end = time.monotonic() + seconds
        while (alive := self.processes()) and time.monotonic() < end:
            psutil.wait_procs([p for p in alive if p.pid != self.process.pid], timeout=0.1)
            self.process.poll()  # our own child: it is reaped here, so that its exit code is not lost
        return [" ".join(process.cmdline()) for process in alive]

    def end(self) -> None:
        for process in self.processes():
            process.send_signal(signal.SIGKILL)
        self.process.wait(10)


@contextmanager
def launched(
    run_dir: Path,
    *arguments: str,
    recipe: str = ROLES,
    slots: int = 1,
    torchrun: tuple[str, ...] = ("--standalone",),
    **environment: str,
) -> Iterator[Launched]:
    """A run of `recipe` that is gone, to the last process, when the block ends."""
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun, "--nproc-per-node", str(slots)]
    command += ["-m", "meshy.ignitor", recipe, *arguments, "--run-dir", str(run_dir)]
    run = Launched(run_dir, command, environment)
    try:
        yield run
    finally:
        run.end()
