"""What the trainer's leader does with new weights: publish, bring up to date who missed them, verify, keep on disk."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshy.generation.expected import ExpectedChecksums
from meshy.models import read_config
from meshy.service import Context
from meshy.training.commands import ExpectWeights, GiveWeights, StreamWeights, WriteWeights
from meshy.training.config import TrainerConfig
from meshy.training.weights.choice import Target, choose
from meshy.training.weights.collective import Collective
from meshy.training.weights.folder import dtype_of, prune_weights, settle_weights, stage_weights
from meshy.training.weights.publisher import Carrier, Published, Publisher
from meshy.training.weights.shm import Shm
from meshy.training.weights.verify import Verifier, differences, refuse

log = logging.getLogger("meshy.training")


LEAST_SECONDS = 1.0  # for an attempt with a replica that came at the last moment


class NobodyServes(RuntimeError):
    """No inference replica could be brought to the weights that it should serve."""


class Publishing:
    """One in the trainer's first rank. command: has every rank execute a command, this one with `take`.

    dtype: of weights that are streamed; stored: of those that are put on disk, of which one run keeps no others.

    A version goes `stage` (while the trainer has its GPUs), `publish`, then `after_gate`. payload: what whoever uses
    the GPUs next should know.
    """

    def __init__(
        self,
        context: Context,
        command: Callable[[Any], Any],
        dtype: torch.dtype,
        stored: torch.dtype,
        device: torch.device,
    ) -> None:
        assert isinstance(context.group.config, TrainerConfig)
        self.config = context.group.config
        self.context, self.dtype, self.stored, self.device = context, dtype, stored, device
        self._command = command
        self._replicas = [r for id in self.config.publish_to for r in context.topology.replicas_of(id)]
        self._urls = tuple(replica.url for replica in self._replicas)
        self._publisher: Publisher | None = None
        self._verifier: Verifier | None = None
        self.payload: dict[str, Any] = {}
        self._version = 0
        self._between = False  # the weights have been trained further than that version
        self._staged: Path | None = None
        self._sent = dtype  # of the weights that replicas are given

    @property
    def behind(self) -> list[str]:
        """The replicas that do not serve the newest version, as far as is known."""
        return self._publisher.watch.behind(self._version) if self._publisher is not None else []

    @property
    def _streams(self) -> bool:
        """Whether weights travel without a disk."""
        return self._publisher is not None and self._publisher.carrier is not None

    def start(self) -> None:
        """Waits until every replica serves the initial weights, and decides how new ones go there. ReplicaError,
        WrongVersion, ValueError."""
        if not self._urls:
            return
        config = self.config
        self._publisher = Publisher(self._urls, in_flight=config.publish_in_flight, deadline=config.weights_deadline)
        in_turn = [replica.url for replica in self._replicas if replica.ring is not None]
        told = self._publisher.start(config.weights_deadline, in_turn)
        targets = [
            Target(
                name=replica.name,
                url=replica.url,
                hosts=tuple(dict.fromkeys(process.host for process in replica.processes)),
                ranks=told[replica.url].get("tp_size") or 1,
                dp=told[replica.url].get("dp_size") or 1,
                quantization=told[replica.url].get("quantization"),
                in_ring=replica.ring is not None,
            )
            for replica in self._replicas
        ]
        mode = choose(config.publish, self.context.replica.host, targets)
        self._sent = self.stored if mode == "disk" else self.dtype
        self._publisher.carrier = self._carrier(mode, targets)
        model = read_config(self.context.model_folder)
        self._verifier = Verifier(model, dtype_of(self.context.model_folder, "auto"), told)
        self._publisher.keep_watch(0)
        log.info("new weights go to %d replicas by %s, as %s", len(targets), mode, self._sent)

    def _carrier(self, mode: str, targets: list[Target]) -> Carrier | None:
        ranks = {target.url: target.ranks for target in targets}
        size = self.config.bucket_mb << 20
        if mode == "shm":
            return Shm(ranks, size)
        if mode == "collective":
            own = self.context.replica
            return Collective(own.host, own.weights_port, ranks, size, self.device)
        return None

    def take(self, command: GiveWeights, tensors: Iterable[tuple[str, Tensor]]) -> Any:
        """This rank's part in a command: what it makes of the tensors, all of which it takes."""
        match command:
            case WriteWeights():
                folder = self.context.folder.weights_of(command.version)
                return stage_weights(folder, tensors, self.context.model_folder, self.stored)
            case StreamWeights():
                assert self._publisher is not None
                return self._publisher.stream(command.version, command.urls, tensors, self.dtype)
            case ExpectWeights():
                assert self._verifier is not None
                return self._verifier.expect(command.urls, ((name, tensor.to(self._sent)) for name, tensor in tensors))
        raise TypeError(f"{type(command).__name__} is no business of {type(self).__name__}")

    # The leader's step ------------------------------------------------------------------------------------------------

    def unsettle(self) -> None:
        """From here on, until `stage`, the trainer's weights are of no version: nobody is given them."""
        self._between = True

    def stage(self, version: int, last: bool = False) -> None:
        """The weights as they are now become this version. The trainer has its GPUs until it returns."""
        self._version, self._between = version, False
        if not self._streams:
            self._staged = self._command(WriteWeights(version))

    def publish(self, version: int) -> Published:
        """Have every replica serve what was staged; one that fails is behind, and brought up to date later.

        At least one serves them in the end: NobodyServes if none can within `weights_deadline` seconds, all attempts
        together. What is returned tells of the last attempt."""
        if self._publisher is None:
            return Published("disk")
        self._publisher.end_watch()
        watch, began = self._publisher.watch, time.monotonic()
        end = began + self.config.weights_deadline
        asked = tuple(watch.asked(version))
        behind = {url: f"{url} failed to load {watch.failed_loads[url]} times in a row" for url in self._urls}
        published = self._give(asked, self.config.weights_deadline)
        while True:
            behind |= published.behind
            published.behind = {url: why for url, why in behind.items() if url not in published.served}
            if published.served:
                return published
            left = end - time.monotonic()
            there = self._publisher.wait_for_one(left) if left > 0 else []
            if not there:
                raise NobodyServes(_nobody(version, time.monotonic() - began, self.config.weights_deadline, behind))
            published = self._give(tuple(there), max(LEAST_SECONDS, end - time.monotonic()))

    def _give(self, urls: tuple[str, ...], seconds: float) -> Published:
        """The newest version to these replicas, within so many seconds."""
        assert self._publisher is not None
        self._publisher.deadline = seconds
        if self._streams:
            published: Published = self._command(StreamWeights(self._version, urls))
            return published
        return self._publisher.from_folder(self._version, urls, self._folder())

    def _folder(self) -> Path:
        """That holds the newest version."""
        return self._staged or self.context.folder.weights_of(self._version)

    def _late(self) -> list[str]:
        """The replicas that are there, serve an older version, and can be given the newest."""
        if self._streams and self._between:
            return []
        return self._publisher.watch.late(self._version) if self._publisher is not None else []

    def meanwhile(self) -> None:
        """While the trainer waits for its batch: brings up to date who is there and serves an older version."""
        late = self._late()
        if self._publisher is None or not late:
            return
        self._publisher.end_watch()
        published = self._give(tuple(late), self.config.weights_deadline)
        for url in published.served:
            log.info("%s is up to date again: it serves weights v%d", url, self._version)
        self._publisher.keep_watch(self._version)

    def after_gate(self, version: int, last: bool) -> None:
        """What need not be done before rollout goes on: the version on disk, and the comparison of checksums."""
        if self._staged is None and self._writes(version, last):
            self._staged = self._write(version)
        if self._staged is not None:
            settle_weights(self._staged)
            self._staged = None
            prune_weights(self.context.folder.weights, self.config.keep_weights)
        if self._publisher is None:
            return
        if self._verifies(version, last):
            self._compare(version, self._expected(tuple(url for url in self._urls if url not in self.behind)))
        self._publisher.keep_watch(version)

    def _writes(self, version: int, last: bool) -> bool:
        """Whether this version is to be put on disk."""
        return last or version % self.config.write_every == 0

    def _write(self, version: int) -> Path:
        folder: Path = self._command(WriteWeights(version))
        return folder

    def _verifies(self, version: int, last: bool) -> bool:
        every = self.config.verify_every
        return every > 0 and (last or version % every == 0)

    def _expected(self, urls: tuple[str, ...]) -> dict[str, ExpectedChecksums]:
        """What these replicas should report of the newest version."""
        expected: dict[str, ExpectedChecksums] = self._command(ExpectWeights(urls))
        return expected

    def _compare(self, version: int, expected: dict[str, ExpectedChecksums]) -> None:
        assert self._publisher is not None
        if not expected:
            return
        reported = self._publisher.checksums(tuple(expected))
        wrong = differences(expected, reported)
        if wrong:  # one that was started again meanwhile serves another version, and will be brought up to date
            self._publisher.look(tuple(wrong))
            refuse({url: names for url, names in wrong.items() if url not in self.behind}, version)
        held = len(reported) - len(wrong)
        log.info("weights v%d: %d of %d replicas hold the trainer's, by checksum", version, held, len(expected))

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


def _nobody(version: int, took: float, deadline: float, why: Mapping[str, str]) -> str:
    over = took >= deadline
    told = f"weights_deadline={deadline:.0f} s has passed" if over else "every one failed, more than once"
    reasons = "\n".join(f"  {reason}" for reason in why.values())
    return f"no inference replica serves weights v{version} after {took:.1f} s of trying ({told}):\n{reasons}"
