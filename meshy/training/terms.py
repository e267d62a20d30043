"""What is added to a policy loss. Torch-free."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshy.importing import path_of


@dataclass(frozen=True, kw_only=True)
class LossTerm:
    """loss: import path or callable, as for the policy loss itself (see `meshy.algorithms.interface`). weight: by which
    it is multiplied. options: of its own. name: of its metrics, `<name>/...`; None for the function's name.
    """

    loss: str | Callable[..., Any]
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None

    @property
    def label(self) -> str:
        return self.name or path_of(self.loss).rpartition(":")[2]
