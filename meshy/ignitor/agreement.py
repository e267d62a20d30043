"""The same run on every rank: all derive it, compare digests, and settle folder, model and ports before spawning."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from meshy.ignitor.discover import Seat
from meshy.ignitor.ports import PortBlock
from meshy.observe.runfolder import RunFolder, RunFolderError, write_json
from meshy.queue.endpoints import Endpoints
from meshy.recipe import Recipe, RecipeError, ServiceGroup, to_json
from meshy.refusals import at
from meshy.service.context import Launch, queue_endpoints, run_digest
from meshy.settings import parse_settings, resolve
from meshy.topology import FIRST_BASE_PORT, LAST_BASE_PORT, PORT_SPAN, Topology, with_base_port

MODEL_DEADLINE = 4 * 3600.0  # seconds; a hub may take long to give a large model


@dataclass(frozen=True)
class Arguments:
    """The command line of an ignitor."""

    recipe_file: str
    settings: list[str]
    run_dir: str | None


@dataclass(frozen=True)
class Run:
    """A run that all ranks agree on."""

    launch: Launch
    recipe: Recipe
    topology: Topology
    folder: RunFolder
    ports: PortBlock

    @cached_property
    def endpoints(self) -> Endpoints:
        return queue_endpoints(self.topology, self.launch.run_id)

    @property
    def launch_file(self) -> Path:
        return self.folder.path / "launch.json"

    @property
    def endpoints_file(self) -> Path:
        return self.folder.path / "queue_endpoints.json"

    @property
    def contract_file(self) -> Path:
        return self.folder.path / "queue_contract.json"


def agree(seat: Seat, arguments: Arguments) -> Run:
    """Derive, check and settle the run. RecipeError, on every rank alike, holds all faults found on any of them."""
    recipe, topology, settings, faults = _derive(seat, arguments)
    _settle_faults(seat, "recipe", faults)
    assert recipe is not None and topology is not None
    digests = seat.gather("digest", run_digest(recipe, topology))
    if len(set(digests)) > 1:
        odd = [r for r, d in enumerate(digests) if d != digests[0]]
        raise RecipeError(
            [f"ranks {odd} derive another run than rank 0 from the same command: are the recipe files the same there?"]
        )
    model_folder, faults = _host_preflight(seat, recipe, topology)
    faults += _folder_faults(seat, arguments, recipe)
    _settle_faults(seat, "preflight", faults)
    block = PortBlock(seat.gpu.host)
    topology = _settle_ports(seat, recipe, topology, block)
    folder, run_id = _run_folder(seat, arguments, recipe)
    launch = Launch(
        run_id=run_id,
        run_dir=str(folder.path),
        recipe_file=str(Path(arguments.recipe_file).resolve()),
        settings=settings,
        gpus=seat.gpus,
        base_port=topology.base_port,
        digest=run_digest(recipe, topology),
        model_folder=model_folder,
    )
    run = Run(launch, recipe, topology, folder, block)
    _settle_faults(seat, "written", _write(seat, run))
    return run


def _derive(seat: Seat, arguments: Arguments) -> tuple[Recipe | None, Topology | None, dict[str, str], list[str]]:
    try:
        settings = parse_settings(arguments.settings)
        recipe, topology = resolve(arguments.recipe_file, settings, seat.gpus)
    except RecipeError as error:
        return None, None, {}, error.faults
    return recipe, topology, settings, []


def _settle_faults(seat: Seat, name: str, faults: list[str]) -> None:
    """Raise on every rank what was found on any: nothing is spawned anywhere unless all is well everywhere."""
    everywhere = seat.gather(f"faults/{name}", faults)
    distinct: dict[str, list[int]] = {}
    for rank, found in enumerate(everywhere):
        for fault in found:
            distinct.setdefault(fault, []).append(rank)
    if distinct:
        raise RecipeError(
            [f if len(ranks) in (1, seat.world_size) else f"{f} (ranks {ranks})" for f, ranks in distinct.items()]
        )


def _folder_faults(seat: Seat, arguments: Arguments, recipe: Recipe) -> list[str]:
    """Whether rank 0 could make the run folder; nothing is left behind by asking."""
    if not seat.is_first:
        return []
    try:
        RunFolder.probe(recipe.name, arguments.run_dir)
    except RunFolderError as error:
        return [str(error)]
    return []


def _run_folder(seat: Seat, arguments: Arguments, recipe: Recipe) -> tuple[RunFolder, str]:
    """Rank 0 makes the folder and names the run; the others learn both."""
    folder, faults = None, []
    if seat.is_first:
        try:
            folder = RunFolder.create(recipe.name, arguments.run_dir)
        except RunFolderError as error:
            faults.append(str(error))
    _settle_faults(seat, "folder", faults)
    mine = {"path": str(folder.path) if folder else "", "run_id": f"{time.strftime('%H%M%S')}-{uuid.uuid4().hex[:8]}"}
    first = seat.gather("folder", mine)[0]
    return RunFolder(Path(first["path"])), first["run_id"]


def _write(seat: Seat, run: Run) -> list[str]:
    """What the spawned processes read, on every host; what people read, on the first."""
    try:
        if seat.leads_host:
            run.folder.make()
            run.launch.write(run.launch_file)
            write_json(run.endpoints_file, run.endpoints.to_json())
            write_json(run.contract_file, run.topology.contract.to_json())
        if seat.is_first:
            write_json(run.folder.recipe, to_json(run.recipe))
            write_json(run.folder.topology, {"run_id": run.launch.run_id, **run.topology.to_json()})
    except (RunFolderError, OSError) as error:
        return [f"{seat.gpu.host}: cannot write the run folder: {error}"]
    return []


def _host_preflight(seat: Seat, recipe: Recipe, topology: Topology) -> tuple[str, list[str]]:
    """The checks that need this host's files: the model's folder, and what each role says that will run here."""
    from meshy.models import ModelError, folder_faults, model_folder

    model, faults = "", []
    if seat.leads_host:
        try:
            folder = model_folder(recipe.model)
            model, faults = str(folder), [f"model: {fault}" for fault in folder_faults(folder)]
        except ModelError as error:
            faults.append(f"model: {error}")
        here = {replica.group for replica in topology.replicas for p in replica.processes if p.host == seat.gpu.host}
        for group in recipe.groups:
            if group.id in here:
                faults += [at(group, fault) for fault in _preflight(group, recipe)]
    everyone = seat.gather("model", {"host": seat.gpu.host, "model": model}, MODEL_DEADLINE)
    model = next(entry["model"] for entry in everyone if entry["host"] == seat.gpu.host)
    return model, faults


def _preflight(group: ServiceGroup, recipe: Recipe) -> list[str]:
    """What the role finds on this host; a check that itself fails is a fault too."""
    try:
        return group.config.preflight(recipe)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - code and files of the user, of any kind
        return [f"its checks failed with {type(error).__name__}: {error}; look at the model's and the data's files"]


def _settle_ports(seat: Seat, recipe: Recipe, topology: Topology, block: PortBlock) -> Topology:
    """The topology on the first block of ports that is free on every host, or on the block that the recipe names."""
    candidates = (
        [recipe.base_port] if recipe.base_port is not None else list(range(FIRST_BASE_PORT, LAST_BASE_PORT, PORT_SPAN))
    )
    for base_port in candidates:
        topology = with_base_port(topology, base_port)
        faults = block.claim(topology.ports_on(seat.gpu.host)) if seat.leads_host else []
        everywhere = [fault for found in seat.gather(f"ports/{base_port}", faults) for fault in found]
        if not everywhere:
            return topology
        block.release()
    if recipe.base_port is None:
        everywhere.append(f"no free block of ports between {candidates[0]} and {candidates[-1] + PORT_SPAN}")
    raise RecipeError(list(dict.fromkeys(everywhere)))
