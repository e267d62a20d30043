"""A process's place in its run, derived from the launch file by the same pure function that the ignitors use."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshy.observe.runfolder import RunFolder
from meshy.queue.endpoints import ControllerEndpoint, Endpoints, StorageEndpoint
from meshy.recipe import Recipe, ServiceGroup, to_json
from meshy.settings import resolve
from meshy.topology import Gpu, Process, Replica, Topology


@dataclass(frozen=True)
class Launch:
    """Everything that a process needs to derive the run: written once by an ignitor, read by all it spawns."""

    run_id: str
    run_dir: str
    recipe_file: str
    settings: dict[str, str]
    gpus: tuple[Gpu, ...]
    base_port: int
    digest: str
    model_folder: str

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> Launch:
        data: dict[str, Any] = json.loads(path.read_text())
        return cls(**{**data, "gpus": tuple(Gpu(**gpu) for gpu in data["gpus"])})

    def derive(self) -> tuple[Recipe, Topology]:
        """The recipe and topology of the run. RuntimeError where the recipe file has changed since the run began."""
        recipe, topology = resolve(self.recipe_file, self.settings, self.gpus, self.base_port)
        if run_digest(recipe, topology) != self.digest:
            raise RuntimeError(
                f"the run derived here differs from the one that was begun: was {self.recipe_file}, or a "
                "module that it imports, changed meanwhile? Start the run again"
            )
        return recipe, topology


@dataclass(frozen=True)
class Context:
    """Where one service process stands.

    model_folder: the run's initial model, as a folder on this host.
    rank, world_size: this process among those of its replica.
    """

    run_id: str
    folder: RunFolder
    recipe: Recipe
    topology: Topology
    group: ServiceGroup
    replica: Replica
    process: Process
    model_folder: Path

    @property
    def name(self) -> str:
        """`trainer.0`; further processes of a replica are `trainer.0.rank1` and so on."""
        return self.process.name

    @property
    def endpoints(self) -> Endpoints:
        """Where the queue of this run listens."""
        return queue_endpoints(self.topology, self.run_id)

    @property
    def rank(self) -> int:
        return self.process.rank

    @property
    def world_size(self) -> int:
        return len(self.replica.processes)

    @classmethod
    def load(cls, launch_file: Path, name: str) -> Context:
        """The context of the process called `name`."""
        launch = Launch.read(launch_file)
        recipe, topology = launch.derive()
        for replica in topology.replicas:
            for process in replica.processes:
                if process.name == name:
                    return cls(
                        run_id=launch.run_id,
                        folder=RunFolder(Path(launch.run_dir)),
                        recipe=recipe,
                        topology=topology,
                        group=recipe.group(replica.group),
                        replica=replica,
                        process=process,
                        model_folder=Path(launch.model_folder),
                    )
        raise RuntimeError(f"the topology has no process {name!r}")


def run_digest(recipe: Recipe, topology: Topology) -> str:
    """One hash of all that a run is: its settings and its topology."""
    settings = json.dumps(to_json(recipe), sort_keys=True)
    return hashlib.sha256(f"{settings}{topology.digest}".encode()).hexdigest()


def queue_endpoints(topology: Topology, run_id: str) -> Endpoints:
    """The queue's addresses as the topology placed them."""
    handshake, request, doorbell, admin = topology.controller.ports
    return Endpoints(
        controller=ControllerEndpoint(
            host=topology.controller.host, handshake=handshake, request=request, doorbell=doorbell, admin=admin
        ),
        storage=tuple(StorageEndpoint(host=unit.host, request=unit.ports[0]) for unit in topology.storage),
        run_id=run_id,
    )
