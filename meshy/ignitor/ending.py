"""How a run ends: said once, through torchrun's store, and heard by all ignitors."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
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


def count_restart(store: Store, name: str) -> None:
    """Note for the summary that `name` is started again."""
    try:
        store.add(f"restarts/{name}", 1)
    except Exception as error:  # noqa: BLE001 - the run is over, and `hear` will say so
        log.warning("torchrun's store is gone (%s)", error)


def restart_counts(store: Store, names: Iterable[str]) -> dict[str, int]:
    """How often each of `names` was started again; those that never were are left out."""
    try:
        return {name: store.add(key, 0) for name in names if store.check([key := f"restarts/{name}"])}
    except Exception as error:  # noqa: BLE001 - torchrun's agent may be gone at the end
        log.warning("torchrun's store is gone (%s): restarts are not counted in the summary", error)
        return {}
