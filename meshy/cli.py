"""The `meshy` command: check a recipe, look at a run."""

from __future__ import annotations

import argparse
import sys

from meshy.recipe import Recipe, RecipeError
from meshy.settings import parse_settings, resolve
from meshy.topology import Topology, gpu_list


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 when all is well, 2 when the recipe or the command line is at fault."""
    sys.path.insert(0, "")  # modules beside the recipe's user, as `python -m meshy.ignitor` finds them
    parser = argparse.ArgumentParser(prog="meshy", description="Reinforcement learning of language models.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser(
        "check",
        help="what a recipe would start, and whether it fits; starts nothing",
        usage="meshy check [--gpus N] [--hosts N] recipe [name=value ...]",
        epilog="Settings are given as to a run: steps=20 trainer.lr=2e-4, and the recipe function's own arguments.",
    )
    check.add_argument("recipe", help="a recipe file")
    check.add_argument("--gpus", type=int, default=2, help="GPUs, or CPU slots, in all (default: 2)")
    check.add_argument("--hosts", type=int, default=1, help="hosts that hold them (default: 1)")
    status = commands.add_parser("status", help="how a run is, or how it ended")
    status.add_argument("run", help="a run folder, as the run printed it")
    status.add_argument("--watch", action="store_true", help="go on looking until the run ends")
    status.add_argument("--json", action="store_true", help="print JSON")
    arguments, settings = parser.parse_known_args(argv)
    if arguments.command == "check":
        return check_recipe(arguments.recipe, settings, arguments.gpus, arguments.hosts)
    if settings:
        parser.error(f"unrecognized arguments: {' '.join(settings)}")
    from meshy.observe.status import status as show

    return show(arguments.run, watch=arguments.watch, as_json=arguments.json)


def check_recipe(path: str, settings: list[str], gpus: int, hosts: int) -> int:
    """Derive the topology on a made-up GPU list and print it; every fault, where there are any."""
    try:
        if gpus < 1 or hosts < 1 or gpus % hosts:
            raise RecipeError([f"--gpus {gpus} --hosts {hosts}: give a number of GPUs that the hosts share evenly"])
        recipe, topology = resolve(path, parse_settings(settings), gpu_list(hosts, gpus // hosts))
    except RecipeError as error:
        print(f"{path}: {len(error.faults)} fault(s)", file=sys.stderr)
        print("\n".join(f"  - {fault}" for fault in error.faults), file=sys.stderr)
        if any(fault.startswith("too few GPUs") for fault in error.faults):
            print("say with --gpus and --hosts how many there will be", file=sys.stderr)
        return 2
    show_topology(recipe, topology)
    return 0


MOST_ROWS = 40


def show_topology(recipe: Recipe, topology: Topology) -> None:
    """The topology as tables: services, columns, the queue's size."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    services = Table(title=f"{recipe.name}: {len(topology.processes)} processes on {len(topology.hosts)} host(s)")
    for heading in ("service", "host", "GPUs", "endpoint", "distributed", "admin", "ring"):
        services.add_column(heading)
    for process, replica in [(p, r) for r in topology.replicas for p in r.processes][:MOST_ROWS]:
        services.add_row(
            process.name,
            process.host,
            _ranges(process.gpus) or "-",
            str(replica.endpoint_port) if recipe.group(replica.group).config.serves_http else "-",
            str(replica.distributed_port) if len(replica.processes) > 1 else "-",
            str(process.admin_port),
            replica.ring or "-",
        )
    console.print(services)
    if len(topology.processes) > MOST_ROWS:
        console.print(f"... and {len(topology.processes) - MOST_ROWS} more")
    unused = len(topology.gpus) - len({rank for replica in topology.replicas for rank in replica.gpus})
    if unused:
        console.print(f"note: {unused} of {len(topology.gpus)} GPUs are used by no service")
    columns = Table(title="columns")
    for heading in ("group", "consumes", "produces"):
        columns.add_column(heading, overflow="fold")
    for group in recipe.groups:
        consumes = [
            f"{c.partition}: {', '.join(c.names)}{' (clears)' if c.end else ''}" for c in group.config.consumes(recipe)
        ]
        produces = [f"{p.partition}: {', '.join(c.name for c in p.columns)}" for p in group.config.produces(recipe)]
        columns.add_row(group.id, "\n".join(consumes) or "-", "\n".join(produces) or "-")
    console.print(columns)
    per_partition = ", ".join(f"{name} {rows}" for name, rows in topology.contract.capacity.items())
    console.print(
        f"queue: controller on {topology.controller.host}, {len(topology.storage)} storage unit(s), room for "
        f"{topology.capacity_rows} rows ({per_partition})"
    )
    console.print(f"digest {topology.digest[:16]}")
    console.print("models, data, rewards, losses and engines are not looked at here, but when a run starts")


def _ranges(ranks: tuple[int, ...]) -> str:
    """`0-3` for (0, 1, 2, 3)."""
    if len(ranks) > 1 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


if __name__ == "__main__":
    sys.exit(main())
