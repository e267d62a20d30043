"""`python -m meshy.inference.sglang.launcher PARENT COMMAND...`: become COMMAND, and die when process PARENT does.

The kernel's parent-death signal outlives the exec, so a server in any other interpreter goes with its service, however
that one ends; SGLang ties its own schedulers to the server in the same way.
"""

from __future__ import annotations

import os
import signal
import sys

from meshy.lifetime import die_with_parent


def main(parent: str, *command: str) -> None:
    die_with_parent(signal.SIGKILL, int(parent))
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
