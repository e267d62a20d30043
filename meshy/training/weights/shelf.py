"""Folders of weights for replicas that load them in a turn of their own, when the trainer has left the GPUs."""

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Self

from meshy.training.weights.folder import name_weights, prune_weights

KEPT = 2  # versions: a replica may still be loading the one before
MEMORY = Path("/dev/shm")
PREFIX = "meshy-weights-"


class Shelf:
    """Holds root/v<N>, the newest two, until it is closed. A lock on the folder says that its trainer lives: what is
    left behind by one that was killed is taken away by the next trainer that keeps its weights beside it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for other in root.parent.glob(f"{PREFIX}*"):
            _remove_if_left(other)
        self._lock = _make(root)

    @classmethod
    def in_memory(cls, run_id: str) -> Self:
        return cls(MEMORY / f"{PREFIX}{run_id}")

    @classmethod
    def on_disk(cls, weights: Path) -> Self:
        """Beside the versions that a run keeps, so that those can be links to these."""
        return cls(weights / f"{PREFIX}shelf")

    def place(self, version: int) -> Path:
        """The folder for it."""
        return self.root / f"v{version}"

    def put(self, part: Path) -> Path:
        """A folder that was staged for its place stands there, and the oldest go."""
        folder = name_weights(part)
        prune_weights(self.root, KEPT)
        return folder

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        with suppress(OSError):
            os.close(self._lock)


def lacking_memory(model: int, memory: Path = MEMORY) -> str:
    """Why a shelf in memory would not hold the weights of a model of so many bytes; empty where it does. One version
    more than are kept is there while it is staged."""
    needed, free = (KEPT + 1) * model, shutil.disk_usage(memory).free
    return f"{memory} has {free >> 20} MiB free, and {needed >> 20} are needed" if free < needed else ""


def _make(root: Path) -> int:
    """Makes the folder; it is locked before it has its name, so that nobody takes it for one that was left behind."""
    hidden = root.parent / f".{root.name}"
    hidden.mkdir(parents=True, exist_ok=True)
    lock = os.open(hidden, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    hidden.rename(root)
    return lock


def _remove_if_left(folder: Path) -> None:
    try:
        if folder.stat().st_uid != os.getuid():
            return
        lock = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return  # its trainer has just ended
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return  # its trainer lives
    finally:
        os.close(lock)
