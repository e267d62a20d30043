"""Publishing by a trainer in a ring: when replicas may load new weights, the trainer has left the GPUs."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from meshy.generation.expected import ExpectedChecksums, write_expected
from meshy.training.commands import ExpectWeights, GiveWeights, ShelveWeights
from meshy.training.publishing import Publishing
from meshy.training.weights.choice import Target
from meshy.training.weights.folder import stage_copy, stage_weights, weight_bytes
from meshy.training.weights.publisher import Carrier, Published
from meshy.training.weights.shelf import Shelf, lacking_memory

log = logging.getLogger("meshy.training")


class RingPublishing(Publishing):
    """A version is written to a shelf, in shared memory or on disk, while the trainer has the GPUs. `payload` travels
    with the token and names the folder; a replica of the ring loads it when it has the GPUs again, or has been started
    again, and is only waited for. All replicas that it publishes to are in its ring; recipes are refused otherwise.

    In a ring of two, replicas have the GPUs from the gate on until the trainer asks for them, and report checksums like
    any others. In a larger one the next member may have them already, so the trainer leaves its checksums beside the
    weights, and replicas compare when they have loaded those."""

    _shelf: Shelf | None = None
    _sums: Mapping[str, ExpectedChecksums] | None = None
    mode = "disk"

    @property
    def _compare_themselves(self) -> bool:
        """Whether the replicas of the ring compare checksums, not the trainer."""
        ring = next(ring for ring in self.context.topology.rings if ring.id == self.context.replica.ring)
        return len(ring.members) > 2

    def _carrier(self, mode: str, targets: list[Target]) -> Carrier | None:
        if self.config.publish == "collective":
            raise ValueError("publish='collective': the trainer is in a ring, from where weights go by a folder only")
        context, self.mode = self.context, "shm" if mode == "shm" else "disk"
        if self.mode == "shm" and (lacking := lacking_memory(weight_bytes(context.model_folder))):
            if self.config.publish == "shm":
                raise ValueError(f"publish='shm': {lacking}; use 'disk' or 'auto', or give the host more")
            log.warning("weights go by disk: %s", lacking)
            self.mode = "disk"
        if self.mode == "shm":
            self._shelf = Shelf.in_memory(context.run_id)
        else:
            self._sent, self._shelf = self.stored, Shelf.on_disk(context.folder.weights)
        return None

    def stage(self, version: int, last: bool = False) -> None:
        """Also whatever else needs the tensors: they are gone afterwards."""
        if self._shelf is None:  # nobody is given weights
            return super().stage(version, last)
        self._version = version
        shelved = self._shelf.put(self._command(ShelveWeights(version)))
        if self._verifies(version, last):
            self._sums = self._command(ExpectWeights(self._urls))
            if self._compare_themselves:
                write_expected(shelved, self._sums)
        if self._writes(version, last) and self._sent != self.stored:
            self._staged = super()._write(version)
        self.payload = {"weights": {"version": version, "folder": str(shelved)}}

    def take(self, command: GiveWeights, tensors: Iterable[tuple[str, Tensor]]) -> Any:
        if isinstance(command, ShelveWeights):
            assert self._shelf is not None
            return stage_weights(self._shelf.place(command.version), tensors, self.context.model_folder, self._sent)
        return super().take(command, tensors)

    def _give(self, urls: tuple[str, ...], seconds: float) -> Published:
        assert self._publisher is not None
        published = Published(self.mode, bytes=weight_bytes(self._folder()))
        self._publisher.await_served(self._version, urls, published)
        return published

    def _folder(self) -> Path:
        assert self._shelf is not None
        return self._shelf.place(self._version)

    def _late(self) -> list[str]:
        """None: replicas of the ring take weights up with the token."""
        return []

    def _writes(self, version: int, last: bool) -> bool:
        return self.mode == "disk" or super()._writes(version, last)

    def _write(self, version: int) -> Path:
        return stage_copy(self.context.folder.weights_of(version), self._folder())

    def _expected(self, urls: tuple[str, ...]) -> dict[str, ExpectedChecksums]:
        assert self._sums is not None
        if self._compare_themselves:
            return {}
        return {url: sums for url, sums in self._sums.items() if url in urls}

    def close(self) -> None:
        super().close()
        if self._shelf is not None:
            self._shelf.close()
            self._shelf = None
