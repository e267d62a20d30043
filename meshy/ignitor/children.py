"""The processes that this ignitor owns: each spawned in a session of its own, watched by a thread, stopped in order."""

from __future__ import annotations

import logging
import os
import queue
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from meshy.lifetime import FORMER_LIVES, LIFE
from meshy.service.exits import FAILED_TO_START, UNRECOVERABLE

log = logging.getLogger(__name__)

WATCHDOG_SECONDS = 60.0  # of waiting for the dead, then a line in the log says for which

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "PET_")


@dataclass
class Child:
    """One owned process. log_start: where its own words begin in its log, in bytes. life: a name for this process,
    which the one that replaces it does not have. former: the lives of all that it replaces, one after the other."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]
    command: list[str]
    environment: Mapping[str, str]
    log_start: int
    life: str
    former: tuple[str, ...] = ()

    @property
    def how_it_ended(self) -> str:
        code = self.process.returncode
        if code is None:
            return "is alive"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        told = {FAILED_TO_START: ", for it failed to start", UNRECOVERABLE: ", for what it would meet again"}
        return f"ended with exit code {code}{told.get(code, '')}"


@dataclass(frozen=True)
class Buried:
    """Nothing is left of a child that has ended, nor of all that it had started."""

    child: Child


class Children:
    """Spawn and watch. `exits` receives each child as it ends, in the order in which they end."""

    def __init__(self) -> None:
        self.all: list[Child] = []
        self.exits: queue.SimpleQueue[Any] = queue.SimpleQueue()  # the watch loop puts other events there

    def spawn(
        self,
        name: str,
        command: list[str],
        log_file: Path,
        environment: Mapping[str, str],
        former: tuple[str, ...] = (),
    ) -> Child:
        """Start `command` with its output in `log_file`, in a session of its own, to die with this process. It is told
        its life and its former ones.

        Must be called from the main thread: the kernel ties a child's life to the thread that made it.
        """
        life = secrets.token_hex(6)
        with log_file.open("ab") as output:
            log_start = output.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **environment,
                    "MESHY_PARENT": str(os.getpid()),
                    LIFE: life,
                    FORMER_LIVES: ",".join(former),
                },
                start_new_session=True,
            )
        child = Child(name, log_file, process, command, environment, log_start, life, former)
        self.all.append(child)
        threading.Thread(target=self._await_exit, args=(child,), name=f"watch-{name}", daemon=True).start()
        return child

    def _await_exit(self, child: Child) -> None:
        child.process.wait()
        self.exits.put(child)

    def bury(self, dead: Child) -> None:
        """End what `dead` had started, which may hold ports, or a GPU's memory, and put Buried into `exits` when the
        last of it is gone. On a thread: a process with much memory on a GPU takes a while to go."""
        threading.Thread(target=self._bury, args=(dead,), name=f"bury-{dead.name}", daemon=True).start()

    def _bury(self, dead: Child) -> None:
        end_session(dead)
        self.exits.put(Buried(dead))

    def replace(self, dead: Child) -> Child:
        """Start `dead` again, which must be buried."""
        self.all.remove(dead)
        return self.spawn(dead.name, dead.command, dead.log, dead.environment, (*dead.former, dead.life))

    def kill_now(self) -> None:
        """SIGKILL to every session, without waiting."""
        for child in self.all:
            _signal(child, signal.SIGKILL, whole_session=True)

    def stop(self, grace: float, names: Iterable[str] | None = None) -> None:
        """SIGTERM to each (or to `names`), SIGKILL to what is left of their sessions after `grace` seconds."""
        chosen = [child for child in self.all if names is None or child.name in set(names)]
        for child in chosen:
            if child.process.poll() is None:
                _signal(child, signal.SIGTERM, whole_session=False)
        end = time.monotonic() + grace
        for child in chosen:
            try:
                child.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("%s did not end within %.0f s of SIGTERM and is killed", child.name, grace)
        for child in chosen:
            _signal(child, signal.SIGKILL, whole_session=True)
            child.process.wait()


def _signal(child: Child, signum: signal.Signals, whole_session: bool) -> None:
    """whole_session: also all that it has started, in whatever process groups, unless that left the session."""
    for pid in _session_of(child.process.pid) if whole_session else [child.process.pid]:
        try:
            os.kill(pid, signum)
        except (ProcessLookupError, PermissionError):
            continue  # already gone


def end_session(dead: Child) -> None:
    """SIGKILL to all that `dead` had started, unless it left the session. Returns when all of it is gone."""
    began = time.monotonic()
    while left := [pid for pid in _session_of(dead.process.pid) if not _ends_within(0.0, pid)]:
        _signal(dead, signal.SIGKILL, whole_session=True)
        until = time.monotonic() + WATCHDOG_SECONDS
        if not all(_ends_within(until - time.monotonic(), pid) for pid in left):
            seconds = time.monotonic() - began
            log.warning("waiting %.0f s for what %s has left behind to end: %s", seconds, dead.name, _told(left))


def _ends_within(seconds: float, pid: int) -> bool:
    """Zombies have ended: the kernel says so when the last thread has given back memory and devices."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], max(0.0, seconds))[0])
    finally:
        os.close(process)


def _told(pids: list[int]) -> str:
    names = []
    for pid in pids:
        try:
            names.append(f"{psutil.Process(pid).name()} (pid {pid})")
        except psutil.NoSuchProcess:
            continue
    return ", ".join(names) or "nothing any more"


def _session_of(leader: int) -> list[int]:
    members = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == leader:
                members.append(pid)
        except (ProcessLookupError, PermissionError):
            continue  # gone meanwhile, or another user's
    return members


def without_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """Without torchrun's own variables, by which a child would take itself for one of its ranks."""
    return {
        name: value
        for name, value in environment.items()
        if name not in TORCHRUN_VARIABLES and not name.startswith(TORCHRUN_PREFIXES)
    }


def service_environment(local_gpus: list[int], on_cpu: bool) -> dict[str, str]:
    """The environment of a child: torchrun's own variables taken out, only its GPUs visible, one thread on CPU."""
    environment = without_torchrun(os.environ)
    environment["PYTHONUNBUFFERED"] = "1"
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    if on_cpu:
        environment["OMP_NUM_THREADS"] = environment.get("MESHY_THREADS", "1")  # services share the cores
        return environment
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(max(local_gpus, default=-1) + 1)]
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] for i in local_gpus)
    return environment


def service_command(launch_file: Path, name: str) -> list[str]:
    return [sys.executable, "-m", "meshy.service", str(launch_file), name]
