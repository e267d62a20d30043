"""A process's life: which one of a service's it is, and that it ends when its parent does, however that ends."""

from __future__ import annotations

import atexit
import ctypes
import os
import select
import signal
import sys
import threading
import time

LIFE = "MESHY_LIFE"
"""The environment variable by which an ignitor tells one life of a service from the next."""

FORMER_LIVES = "MESHY_FORMER_LIVES"
"""The environment variable by which an ignitor tells a service of all its lives before this one, with commas between
them: one may have died before it could finish with the one before it."""

_PR_SET_PDEATHSIG = 1


def own_life() -> str:
    """The name of this life; empty outside of a run."""
    return os.environ.get(LIFE, "")


def former_lives() -> tuple[str, ...]:
    return tuple(life for life in os.environ.get(FORMER_LIVES, "").split(",") if life)


def die_with_parent(how: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Have the kernel send `how` to this process when its parent dies (Linux; elsewhere the parent's own care must do).

    parent: the parent's pid, as the parent knew it; where that one is already gone, this process ends at once.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(how), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(error)}")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), how)


def end_session_with_parent(parent: int, grace: float) -> None:
    """For the leader of a session: SIGTERM when `parent` dies, and SIGKILL to the whole session `grace` seconds later.

    So what this process has started goes with it, even where it pays no heed to SIGTERM.
    """
    die_with_parent(signal.SIGTERM, parent)
    if not hasattr(os, "pidfd_open") or os.getpid() != os.getpgrp():
        return
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        os.killpg(os.getpgrp(), signal.SIGKILL)
        return

    def watch() -> None:
        select.select([watched], [], [])  # readable once the parent is gone
        time.sleep(grace)  # the orderly end, if it comes, ends this thread with its process
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()
    atexit.register(_leave_nothing, parent)


def _leave_nothing(parent: int) -> None:
    """At an orphan's exit: nobody else will end what it has started."""
    if os.getppid() != parent:
        os.killpg(os.getpgrp(), signal.SIGKILL)
