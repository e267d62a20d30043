"""`python -m meshy.service LAUNCH_FILE NAME`: one service process, as an ignitor starts it."""

from __future__ import annotations

import faulthandler
import os
import secrets
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from meshy.importing import load
from meshy.lifetime import LIFE, end_session_with_parent
from meshy.observe.logs import setup_logging
from meshy.service.base import Service
from meshy.service.context import Context
from meshy.service.exits import ENDED_AS_ASKED, FAILED_TO_START, UNRECOVERABLE, Unrecoverable
from meshy.service.readiness import wait_until_ready

RING_HOOKS = ("free_gpu", "restore_gpu")
ORPHAN_GRACE = 4.0  # seconds for an orderly end when the ignitor is gone


class Stopped(BaseException):
    """SIGTERM arrived: unwind from wherever the service is. No Exception, so that no handler of a role swallows it."""


def main(launch_file: str, name: str) -> int:
    if "MESHY_PARENT" in os.environ:
        end_session_with_parent(int(os.environ["MESHY_PARENT"]), grace=ORPHAN_GRACE)
    setup_logging(name)
    faulthandler.register(signal.SIGUSR1)  # kill -USR1 writes the stack of every thread to the log
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the ignitor decides when a service ends
    context = Context.load(Path(launch_file), name)
    service: Service = load(context.group.config.service)(context)
    service.log.info("pid %d, GPUs %s", os.getpid(), list(context.process.gpus) or "none")

    def stop(signum: int, frame: FrameType | None) -> None:
        if not service.stopping.is_set():
            service.stopping.set()
            service.tell("stopping", "asked to end")
            raise Stopped

    signal.signal(signal.SIGTERM, stop)
    return live(service)


def join_ring(service: Service) -> None:
    """In a ring, the process that speaks for the replica takes its place there."""
    context = service.context
    ring = next((ring for ring in context.topology.rings if ring.id == context.replica.ring), None)
    if ring is None or context.rank:
        return
    from meshy.colocation.agent import Agent, Hooks
    from meshy.colocation.turns import Rule

    if missing := [
        hook for hook in ("free_gpu", "restore_gpu") if getattr(type(service), hook) is getattr(Service, hook)
    ]:
        raise NotImplementedError(
            f"{type(service).__name__} is in ring {ring.id!r}, but does not say how to give its GPUs up and take them "
            f"back: it lacks {' and '.join(missing)}"
        )

    failures: list[BaseException] = []

    def fail(signum: int, frame: FrameType | None) -> None:
        raise RuntimeError(f"this service has lost its place in ring {ring.id!r}") from failures[0]

    def failed(error: BaseException) -> None:
        failures.append(error)
        main = threading.main_thread().ident
        if main is not None and not service.stopping.is_set():
            signal.pthread_kill(main, signal.SIGUSR2)

    signal.signal(signal.SIGUSR2, fail)

    def free() -> None:
        with service.timeline.span("free"):
            service.free_gpu()

    def restore(payload: Mapping[str, Any]) -> None:
        with service.timeline.span("restore"):
            service.restore_gpu(payload)

    hooks = Hooks(free=free, restore=restore, payload=service.gpu_payload, failed=failed)
    service.ring = Agent(
        ring.id,
        Rule(ring.members),
        context.replica.name,
        os.environ.get(LIFE) or secrets.token_hex(6),
        hooks,
        context.endpoints,
        context.topology.contract,
    )
    service.ring.start()


def live(service: Service) -> int:
    """Take a service through its life; the exit code of the process."""
    from meshy.service.admin import AdminServer

    context = service.context
    admin = AdminServer(service, context.process.host, context.process.admin_port)
    admin.start()
    was_ready = False
    try:
        join_ring(service)
        service.setup()
        if context.group.wait_for:
            service.tell("waiting", f"for {', '.join(context.group.wait_for)}")
            wait_until_ready(context.topology, context.group.wait_for, context.run_id, service.stopping)
        service.tell("ready")
        was_ready = True
        service.run()
        if service.stopping.is_set():  # it was asked to end and unwound by itself
            return ENDED_AS_ASKED
    except Stopped:
        service.log.info("ended as asked")
        return ENDED_AS_ASKED
    except BaseException as error:
        service.tell("failed")
        unrecoverable = isinstance(error, Unrecoverable)
        if isinstance(error, (SystemExit, KeyboardInterrupt)) or (was_ready and not unrecoverable):
            raise
        traceback.print_exc()  # of TorchTitan, too, whose errors may be no Exception
        return UNRECOVERABLE if unrecoverable else FAILED_TO_START
    finally:
        service.stopping.set()
        service.close()
        service.disconnect()
        admin.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
