"""The queue's processes: `python -m meshy.queue.server controller storage.0 --endpoints E.json --contract C.json`.

One role runs in this process. Several run in one child each, forked after TransferQueue was imported: the import is
paid once, and its memory is shared. The parent then only watches: when a child dies, it stops the others and exits with
1, because a queue without one of its processes is of no use. SIGTERM ends everything with 0, and so does the parent's
death.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from meshy.columns import Contract
from meshy.lifetime import die_with_parent
from meshy.queue.endpoints import CONTROLLER, Endpoints

logger = logging.getLogger("meshy.queue")


def serve(role: str, endpoints: Endpoints, contract: Contract) -> None:
    """Run one of the queue's processes until SIGTERM or SIGINT."""
    from meshy.queue.admin import serve_admin

    stops = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)  # before any thread starts: all inherit it
    if role == CONTROLLER:
        from meshy.queue.controller import Controller

        controller = Controller(endpoints, contract)
        serve_admin(endpoints, controller.locked_table)
    else:
        from meshy.queue.storage import FencedStorageUnit

        FencedStorageUnit(endpoints, endpoints.roles.index(role) - 1)
    logger.info("%s serves as %s, pid %d", role, endpoints.address(role), os.getpid())
    signal.sigwait(stops)
    logger.info("%s ends", role)
    logging.shutdown()
    os._exit(0)  # TransferQueue's threads wait on sockets for ever and hold nothing that must be saved


def supervise(roles: Sequence[str], endpoints: Endpoints, contract: Contract) -> int:
    """Fork a child for each role and wait. Returns the exit status: 0 after a stop signal, 1 after a child's death."""
    import meshy.queue.controller
    import meshy.queue.storage  # noqa: F401  (imported once, here, for all children)

    gc.freeze()  # the children's collections leave the shared pages alone
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
    children = {_fork(role, endpoints, contract): role for role in roles}
    status = 0
    received = signal.sigwait({signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
    if received == signal.SIGCHLD:
        pid, wait_status = os.waitpid(-1, 0)
        code = os.waitstatus_to_exitcode(wait_status)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        logger.error("the queue's %s (pid %d) %s; stopping the queue's other processes", children.pop(pid), pid, how)
        status = 1
    for pid in children:
        os.kill(pid, signal.SIGTERM)
    for pid in children:
        os.waitpid(pid, 0)
    return status


def _fork(role: str, endpoints: Endpoints, contract: Contract) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent(signal.SIGTERM, parent)
        serve(role, endpoints, contract)
    except BaseException:
        logger.exception("the queue's %s failed", role)
    logging.shutdown()
    os._exit(1)


def main(arguments: Sequence[str] | None = None) -> int:
    parent = int(os.environ.get("MESHY_PARENT", os.getppid()))
    parser = argparse.ArgumentParser(prog="python -m meshy.queue.server", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("roles", nargs="+", metavar="ROLE", help="controller, storage.0, storage.1 ...")
    parser.add_argument("--endpoints", type=Path, required=True, help="JSON file of Endpoints")
    parser.add_argument("--contract", type=Path, required=True, help="JSON file of the Contract")
    options = parser.parse_args(arguments)
    die_with_parent(signal.SIGTERM, parent)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    endpoints = Endpoints.from_json(json.loads(options.endpoints.read_text()))
    contract = Contract.from_json(json.loads(options.contract.read_text()))
    for role in options.roles:
        endpoints.host_of(role)  # a wrong name ends here
    # Both are read when TransferQueue is imported: one thread is enough for copying rows.
    os.environ.setdefault("TQ_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if len(options.roles) == 1:
        serve(options.roles[0], endpoints, contract)
    return supervise(options.roles, endpoints, contract)


if __name__ == "__main__":
    sys.exit(main())
