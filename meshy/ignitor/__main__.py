"""`torchrun --nproc-per-node N -m meshy.ignitor RECIPE [path=value ...] [--run-dir DIR]`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from meshy.ignitor.agreement import Arguments, Run, agree
from meshy.ignitor.children import Children, service_command, service_environment
from meshy.ignitor.discover import DiscoveryError, Seat, discover
from meshy.ignitor.ending import Ending, restart_counts, say
from meshy.ignitor.leftovers import remove_leftovers
from meshy.ignitor.watch import QUEUE, Interrupts, Watch
from meshy.lifetime import die_with_parent
from meshy.recipe import RecipeError
from meshy.topology import Process

log = logging.getLogger("meshy.ignitor")

SERVICE_GRACE = 4.0
QUEUE_GRACE = 1.5


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
            ending = Watch(seat, run, children, interrupts).until_the_end()
        except BaseException as error:
            ending = say(seat.store, Ending("failed", "ignitor", repr(error), seat.gpu.host))
            raise
        finally:
            stop(children, interrupts)
            remove_leftovers(run.launch.run_id)
            if story is not None:
                names = [process.name for process in run.topology.processes]
                story.end(ending, started, restart_counts(seat.store, names))
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


def stop(children: Children, interrupts: Interrupts) -> None:
    """Services first, the queue after them."""
    hurry = interrupts.count > 1
    children.stop(0.0 if hurry else SERVICE_GRACE, [child.name for child in children.all if child.name != QUEUE])
    children.stop(0.0 if hurry else QUEUE_GRACE)


if __name__ == "__main__":
    sys.exit(main())
