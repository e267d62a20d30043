"""The bracket round updates by tensors: what may be loaded when, and which version the weights then are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from meshy.inference.embedded.engine import Engine
from meshy.inference.embedded.request import RequestError
from meshy.inference.embedded.weights import WeightError

Named = Sequence[tuple[str, Tensor]]


class UpdateSession:
    """Its methods run on the engine's thread, exclusively.

    A tensor that did not come, or was refused, is missing until it comes: weights that may be partly new get no new
    version.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open = False
        self._missing: set[str] = set()

    def begin(self) -> None:
        if self._open:
            raise RequestError("a weight-update session is already open; call end_weight_update() first")
        self._open = True
        self._missing.clear()

    def end(self) -> None:
        if not self._open:
            raise RequestError("no weight-update session is open; call begin_weight_update() first")
        self._open = False

    def require(self, command: str) -> None:
        """Raises RequestError unless the session is open."""
        if not self._open:
            raise RequestError(f"{command} must run between begin_weight_update() and end_weight_update()")

    def places_for(self, incoming: Named) -> dict[str, Tensor]:
        """The live tensors that these may be received into while the engine is held. No place at all where one of them
        will be refused, for then those that come with it must not change anything."""
        try:
            return self._engine.runner.weights.places_for(incoming)
        except WeightError:
            return {}

    def miss(self, names: Iterable[str]) -> None:
        self._missing.update(names)

    def load(self, command: str, named: Named, version: str | None, flush_cache: bool) -> None:
        """Copy tensors into the live ones; with a version, the weights are now that one. Raises RequestError or
        WeightError; only a version that is refused comes after the tensors were loaded.
        """
        self.require(command)
        names = {name for name, _ in named}
        try:
            if flush_cache:
                self._engine.require_flushable()
            self._engine.runner.weights.load(named)
        except (RequestError, WeightError):
            self.miss(names)
            raise
        self._missing -= names
        if version is None:
            return
        if self._missing:
            raise WeightError(
                f"The tensors were loaded, but the weights are not version {version}: in this session "
                f"{len(self._missing)} others failed and have not come again, e.g. {min(self._missing)}. Send them, "
                "and the version with the last."
            )
        self._engine.weight_version = version
