"""`torchrun --nproc-per-node N -m meshy.ignitor RECIPE [path=value ...] [--run-dir DIR]`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from meshy.ignitor.agreement import Arguments, Run, agree
from meshy.ignitor.children import Child, Children, service_command, service_environment
from meshy.ignitor.discover import DiscoveryError, Seat, discover
from meshy.ignitor.ending import Ending, hear, say
from meshy.lifetime import die_with_parent
from meshy.observe.logs import last_traceback
from meshy.recipe import RecipeError
from meshy.topology import Process

log = logging.getLogger("meshy.ignitor")

QUEUE = "queue"
SERVICE_GRACE = 4.0
QUEUE_GRACE = 1.5
LISTEN_SECONDS = 0.5


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is spawned yet: end at once, also while waiting for others
    logging.basicConfig(level=logging.INFO, format="meshy ignitor: %(message)s")
    try:
        seat = discover()
    except (DiscoveryError, ValueError, RuntimeError) as error:
        refuse([str(error)], loudly=True)
        return 2
    try:
        run = agree(seat, arguments)
    except (RecipeError, DiscoveryError) as error:
        refuse(error.faults if isinstance(error, RecipeError) else [str(error)], loudly=seat.is_first)
        return 2
    ending = live(seat, run)
    if ending.status != "finished":
        tell_torchrun(f"{ending.status}: {ending.service} on {ending.host}: {ending.reason}. {ending.log}")
    return ending.exit_code


def refuse(faults: list[str], loudly: bool) -> None:
    """Say why the run cannot start; nothing has been spawned."""
    text = f"meshy: this run cannot start, for {len(faults)} reason(s):\n" + "\n".join(f"  - {f}" for f in faults)
    tell_torchrun(text)
    if loudly:
        print(text, file=sys.stderr, flush=True)


def tell_torchrun(text: str) -> None:
    """Leave the reason where torchrun looks for it, so that its own closing report names it."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


def parse(argv: list[str] | None) -> Arguments:
    parser = argparse.ArgumentParser(
        prog="python -m meshy.ignitor",
        description="Run a recipe. Started by torchrun, once on every GPU or CPU slot.",
        epilog="Settings are dotted paths: steps=10 trainer.lr=1e-4 rollout.group_size=16",
    )
    parser.add_argument("recipe", help="a recipe file, for example recipes/grpo_sync.py")
    parser.add_argument("--run-dir", help="folder of the run; runs/<recipe>-<time> by default")
    known, settings = parser.parse_known_args(argv)
    return Arguments(known.recipe, settings, known.run_dir)


class Interrupts:
    """SIGINT and SIGTERM as events of the watch loop; a second one cuts the orderly end short."""

    def __init__(self, children: Children) -> None:
        self.count = 0
        self._children = children
        self.events: queue.SimpleQueue[Child | signal.Signals] = children.exits
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._heard)

    def _heard(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1
        self.events.put(signal.Signals(signum))
        if self.count > 1:
            self._children.kill_now()


def live(seat: Seat, run: Run) -> Ending:
    """Spawn what is this ignitor's, watch until the run ends, stop it all, and tell the story."""
    from meshy.ignitor.story import Story

    children = Children()
    interrupts = Interrupts(children)
    ending = Ending("failed", "ignitor", "it failed while spawning", seat.gpu.host)
    started = time.time()
    with ExitStack() as stack:
        stack.callback(run.ports.release)
        story = stack.enter_context(Story(run)) if seat.is_first else None
        try:
            spawn(seat, run, children)
            ending = watch(seat, run, children, interrupts)
        except BaseException as error:
            ending = say(seat.store, Ending("failed", "ignitor", repr(error), seat.gpu.host))
            raise
        finally:
            stop(children, interrupts)
            if story is not None:
                story.end(ending, started)
    return ending


def spawn(seat: Seat, run: Run, children: Children) -> None:
    """The queue's processes first, then services after those that they wait for; each connects when it can."""
    on_cpu = seat.gpu.device == "cpu"
    parts = (run.topology.controller, *run.topology.storage)
    roles = [role for part, role in zip(parts, run.endpoints.roles, strict=True) if part.launcher == seat.rank]
    if roles:
        children.spawn(QUEUE, queue_command(run, roles), run.folder.log(QUEUE), service_environment([], on_cpu=True))
    for process in in_dependency_order(run):
        if process.launcher == seat.rank:
            local = [seat.gpus[rank].local_rank for rank in process.gpus if seat.gpus[rank].host == process.host]
            children.spawn(
                process.name,
                service_command(run.launch_file, process.name),
                run.folder.log(process.name),
                service_environment(local, on_cpu or not local),
            )


def queue_command(run: Run, roles: list[str]) -> list[str]:
    """One command for the queue's processes of a host: it forks one for each role."""
    files = ["--endpoints", str(run.endpoints_file), "--contract", str(run.contract_file)]
    return [sys.executable, "-m", "meshy.queue.server", *roles, *files]


def in_dependency_order(run: Run) -> list[Process]:
    """All processes, those of groups that are waited for first."""
    order: list[str] = []

    def visit(group_id: str) -> None:
        for other in run.recipe.group(group_id).wait_for:
            visit(other)
        if group_id not in order:
            order.append(group_id)

    for group in run.recipe.groups:
        visit(group.id)
    return [process for id in order for replica in run.topology.replicas_of(id) for process in replica.processes]


def watch(seat: Seat, run: Run, children: Children, interrupts: Interrupts) -> Ending:
    """Wait for the run's end: a child's exit here, a signal, or what another ignitor has said."""
    while True:
        try:
            event = interrupts.events.get(timeout=LISTEN_SECONDS)
        except queue.Empty:
            heard = hear(seat.store)
            if heard is not None:
                return heard
            continue
        if isinstance(event, signal.Signals):
            return say(seat.store, Ending("interrupted", "ignitor", f"{event.name} was received", seat.gpu.host))
        ending = ending_of(event, seat, run)
        if ending is not None:
            return say(seat.store, ending)


def ending_of(child: Child, seat: Seat, run: Run) -> Ending | None:
    """What the exit of a child means for the run; None where it goes on."""
    group = child.name.partition(".")[0]
    failed = child.process.returncode != 0 or group == QUEUE
    if not failed and run.recipe.group(group).config.ends_run:
        return Ending("finished", child.name, "it has done its work", seat.gpu.host)
    if not failed:
        log.info("%s has done its work", child.name)
        return None
    heard = hear(seat.store)
    if heard is not None and heard.status != "failed":
        return heard  # it ended in the wake of the run's own end
    trace = last_traceback(child.log) or "(its log is empty)"
    print(f"\nmeshy: {child.name} on {seat.gpu.host} {child.how_it_ended}. The end of {child.log}:\n", file=sys.stderr)
    print("\n".join(f"    {line}" for line in trace.splitlines()), file=sys.stderr, flush=True)
    return Ending("failed", child.name, child.how_it_ended, seat.gpu.host, str(child.log))


def stop(children: Children, interrupts: Interrupts) -> None:
    """Services first, the queue after them."""
    hurry = interrupts.count > 1
    children.stop(0.0 if hurry else SERVICE_GRACE, [child.name for child in children.all if child.name != QUEUE])
    children.stop(0.0 if hurry else QUEUE_GRACE)


if __name__ == "__main__":
    sys.exit(main())
