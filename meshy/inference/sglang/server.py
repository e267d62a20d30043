"""One SGLang server process: started, watched until it is ready, ended with everything that it has started."""

from __future__ import annotations

import http.client
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from meshy.generation.commands import Command
from meshy.generation.transport import message_of
from meshy.inference.sglang.arguments import ServerPlan, server_command, server_environment
from meshy.inference.sglang.last_words import last_words
from meshy.listening import listen

log = logging.getLogger("meshy.inference")

KEPT_LINES = 400
HEALTH_DEADLINE = 25.0  # seconds; SGLang itself gives up on a generation that does not come after 20
ANSWER_DEADLINE = 30.0  # to take a command, and between two pieces of an answer
WATCHDOG_SECONDS = 30.0
LOOK_SECONDS = 0.25
END_GRACE = 1.0  # SGLang looks for a SIGTERM every 5 s only; the ignitor waits 4 s for a service


class SglangFailure(RuntimeError):
    """The server ended, or did not get ready; the message holds its own last lines."""


class SglangServer:
    """`start`, `wait_ready`, then `wait_for_end` again and again; `close` in any case.

    The server has a process group of its own, dies with this process (see `launcher`), and writes into this process's
    log, line by line. Must be made on the main thread: the kernel ties the server's life to the thread that made it.
    """

    def __init__(self, plan: ServerPlan) -> None:
        self.plan = plan
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._scratch: Path | None = None
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Spawn it. OSError where its port is taken: SGLang would say so only when the model is loaded."""
        listen(self.plan.host, self.plan.port).close()
        command = server_command(self.plan)
        log.info("starting %s", " ".join(command))
        self._scratch = Path(tempfile.mkdtemp(prefix="meshy-sglang-"))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "meshy.inference.sglang.launcher", str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=server_environment(self.plan, os.environ, self._scratch),
            process_group=0,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), name="sglang-log", daemon=True)
        self._reader.start()

    def _read(self, output: IO[str]) -> None:
        for line in output:
            self._lines.append(line.rstrip("\n"))
            sys.stderr.write(line)
            sys.stderr.flush()

    def wait_ready(self, deadline: float) -> None:
        """Until it answers `/health`, at most `deadline` seconds. SglangFailure when it ends or takes longer."""
        end = time.monotonic() + deadline
        while not self.answers():
            self.wait_for_end(LOOK_SECONDS)
            if time.monotonic() > end:
                raise SglangFailure(
                    f"SGLang's server (pid {self.pid}) was not ready within {deadline:.0f} s; a large model needs a "
                    f"larger startup_deadline. {self._last_words()}"
                )

    def answers(self) -> bool:
        """Whether the server is up and has just generated a token. Takes a second."""
        connection = http.client.HTTPConnection(self.plan.host, self.plan.port, timeout=HEALTH_DEADLINE)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False  # not listening yet; a server that has died is seen by its process
        finally:
            connection.close()

    def tell(self, command: Command, deadline: float) -> Any:
        """What it answers to a command, at most `deadline` seconds later. SglangFailure where it refuses, in its own
        words, or breaks off."""
        connection = http.client.HTTPConnection(self.plan.host, self.plan.port, timeout=ANSWER_DEADLINE)
        began = time.monotonic()
        try:
            headers = {"content-type": "application/json"}
            connection.request(command.method, command.path, json.dumps(command.body), headers)
            while not select.select([connection.sock], [], [], WATCHDOG_SECONDS)[0]:
                seconds = time.monotonic() - began
                log.warning("waiting for SGLang's answer to %s since %.0f s", command.path, seconds)
                if seconds > deadline:
                    raise SglangFailure(
                        f"SGLang did not carry out {command.path} within {deadline:.0f} s; if it needs longer, raise "
                        f"startup_deadline. {self._last_words()}"
                    )
            response = connection.getresponse()
            status, data = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise SglangFailure(
                f"SGLang broke off {command.path} ({type(error).__name__}: {error}). {self._last_words()}"
            ) from error
        finally:
            connection.close()
        answer = decoded(data)
        if status != 200 or (isinstance(answer, dict) and not answer.get("success", True)):
            raise SglangFailure(f"SGLang refused {command.path} ({status}): {message_of(answer)}")
        return answer

    def wait_for_end(self, timeout: float) -> None:
        """Return after `timeout` seconds; SglangFailure at once when the server ends."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return
        self._kill_group()  # what it has started may hold the pipe open, or memory
        if self._reader is not None:
            self._reader.join(timeout=2)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise SglangFailure(f"SGLang's server (pid {self.pid}, {self.plan.python}) {how}. {self._last_words()}")

    def _last_words(self) -> str:
        return "Its last lines:\n" + "\n".join(f"    | {line}" for line in last_words(self._lines))

    def close(self) -> None:
        """End the server and all that it has started. May be called twice, and before `start`."""
        if self._process is None:
            return
        with _uninterrupted():
            if self._process.poll() is None:
                self._process.terminate()
                try:
                    self._process.wait(END_GRACE)
                except subprocess.TimeoutExpired:
                    log.debug("SGLang's server is killed: it looks for SIGTERM only every few seconds")
            self._kill_group()
            self._process.wait()
            if self._reader is not None:
                self._reader.join(timeout=2)
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)

    def _kill_group(self) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # nothing is left of it


def decoded(data: bytes) -> Any:
    """JSON where it is that, else text."""
    try:
        return json.loads(data) if data else None
    except ValueError:
        return data.decode(errors="replace")


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold SIGTERM back until the server is gone, so that nothing of it is left behind by being told twice to end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
