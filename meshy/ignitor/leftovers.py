"""What killed services leave behind in a host's shared memory."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")


def remove_leftovers(run_id: str) -> None:
    """Take away `meshy-<anything>-<run_id>`, when no service of this host lives any more; services that put folders
    into shared memory name them so, and remove them themselves where they end in good order."""
    for folder in SHARED_MEMORY.glob(f"meshy-*-{run_id}"):
        log.info("removing %s, which a service has left behind", folder)
        shutil.rmtree(folder, ignore_errors=True)
