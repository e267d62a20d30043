"""Ties a process's life to its parent's."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(how: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Have the kernel send `how` to this process when its parent dies (Linux; elsewhere the parent's own care must do).

    parent: the parent's pid, as the parent knew it; where that one is already gone, this process ends at once.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        prctl = libc.prctl
    except (OSError, AttributeError):
        return
    if prctl(_PR_SET_PDEATHSIG, int(how), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(error)}")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), how)
