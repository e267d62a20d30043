"""`python -m tests.spmd.ring_rank FOLDER RANK WORLD PORT FAULT`: one rank of a role in a ring.

A stand-in keeps the token. Every rank keeps a file `used.<rank>` while it uses its GPU; the stand-in looks for them
whenever it passes the token on.
FAULT: `none`, or what goes wrong and where.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshy.observe.runfolder import RunFolder
from meshy.service.context import Context
from meshy.spmd import SpmdService
from meshy.topology import Gpu, derive_topology
from tests.spmd.roles import recipe

SLOW = 0.3  # seconds that the last rank takes longer, so that a leader who does not wait would be seen


class Token:
    """What the agent of an ON_DEMAND service does, with nobody else in the ring."""

    def __init__(self, service: RingRank, folder: Path) -> None:
        self.service, self.folder = service, folder
        self.turns = self.depth = 0

    @contextmanager
    def gpu(self) -> Iterator[None]:
        if self.depth:
            yield
            return
        if self.turns:
            self.service.restore_gpu({"turn": self.turns})
        self.turns += 1
        self.depth += 1
        try:
            yield
        except Exception:
            self.pass_on()
            raise
        finally:
            self.depth -= 1
        self.pass_on()

    def pass_on(self) -> None:
        self.service.free_gpu()
        users = [path.name for path in self.folder.glob("used.*")]
        print(f"passed on; still used by {users}", flush=True)


class RingRank(SpmdService):
    """Every use is a collective; a rank that came or left too early would be seen in the sums, or hang."""

    def __init__(self, context: Context, folder: Path, fault: str) -> None:
        super().__init__(context)
        self.folder, self.fault = folder, fault
        self.payloads: list[Any] = []
        if self.rank == 0:
            self.ring = Token(self, folder)  # type: ignore[assignment]

    @property
    def mark(self) -> Path:
        return self.folder / f"used.{self.rank}"

    def may_fail(self, where: str) -> None:
        if self.fault == f"rank {self.rank} raises in {where}":
            raise ValueError(f"rank {self.rank} cannot go on in {where}")
        if self.fault == f"rank {self.rank} dies in {where}":
            os._exit(9)

    def setup(self) -> None:
        super().setup()
        with self.gpu():
            assert not self.mark.exists()
            self.mark.touch()
            self.may_fail("setup")
            with self.gpu():
                assert self.execute("add") == self.expected
        assert not self.mark.exists()
        with self.gpu():
            assert self.mark.exists()
            assert self.execute("add") == self.expected
        assert not self.mark.exists()

    @property
    def expected(self) -> float:
        return self.world_size * (self.world_size + 1) / 2

    def execute(self, command: Any) -> float:
        if command == "enter":
            with self.gpu():
                pass
        assert self.mark.exists()
        self.may_fail("execute")
        value = torch.tensor([float(self.rank + 1)])
        dist.all_reduce(value)
        return float(value)

    def free_rank(self) -> None:
        if self.rank == self.world_size - 1:
            time.sleep(SLOW)
        self.may_fail("free")
        self.mark.unlink()

    def restore_rank(self, payload: Mapping[str, Any]) -> None:
        if self.rank == self.world_size - 1:
            time.sleep(SLOW)
        self.may_fail("restore")
        self.payloads.append(payload["turn"])
        (self.folder / f"payloads.{self.rank}").write_text(str(self.payloads))
        self.mark.touch()

    def lead(self) -> None:
        for _ in range(3):
            with self.gpu(), self.gpu():
                users = sorted(path.name for path in self.folder.glob("used.*"))
                assert len(users) == self.world_size, users
                assert self.command("add") == self.expected
        if self.fault == "ranks enter in execute":
            with self.gpu():
                self.command("enter")


def main(folder: str, rank: str, world: str, port: str, fault: str) -> None:
    torch.set_num_threads(1)
    one = recipe()
    group = dataclasses.replace(one.groups[0], gpus_per_replica=int(world))
    one = dataclasses.replace(one, groups=(group,))
    topology = derive_topology(one, tuple(Gpu(i, "127.0.0.1", i, "cpu") for i in range(int(world))), 20_000)
    replica = dataclasses.replace(topology.replicas[0], ring="ring0", distributed_port=int(port))
    context = Context(
        run_id="ring",
        folder=RunFolder(Path(folder) / "run").make(),
        recipe=one,
        topology=topology,
        group=group,
        replica=replica,
        process=replica.processes[int(rank)],
        model_folder=Path(folder),
    )
    service = RingRank(context, Path(folder), fault)
    try:
        service.setup()
        service.run()
    except BaseException:
        service.state = "failed"
        raise
    finally:
        service.close()
        service.timeline.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
