"""How a run ends: said once, through torchrun's store, and heard by all ignitors."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)

Status = Literal["finished", "failed", "interrupted"]
_KEY = "end"


@dataclass(frozen=True)
class Ending:
    """Why the run is over. The first one said stands; what fails in its wake does not hide it."""

    status: Status
    service: str = ""
    reason: str = ""
    host: str = ""
    log: str = ""

    @property
    def exit_code(self) -> int:
        return {"finished": 0, "failed": 1, "interrupted": 130}[self.status]


def say(store: Store, ending: Ending) -> Ending:
    """Say how the run ends, unless it has been said. Returns what stands."""
    mine = json.dumps(asdict(ending))
    try:
        return Ending(**json.loads(store.compare_set(_KEY, "", mine)))
    except Exception as error:  # noqa: BLE001 - torchrun's agent, which holds the store, may be gone
        log.warning("torchrun's store is gone (%s): ending this host alone", error)
        return ending


def hear(store: Store) -> Ending | None:
    """What has been said, if anything. A store that is gone with its host is an ending too."""
    try:
        return Ending(**json.loads(store.get(_KEY))) if store.check([_KEY]) else None
    except Exception as error:  # noqa: BLE001 - whatever the transport raises, the run is over
        return Ending("failed", "torchrun", f"its store does not answer any more ({error})")
