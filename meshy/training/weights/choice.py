"""Which way weights go: decided once, from where the replicas are and what they are. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

InFlight = Literal["retract", "keep", "drain", "abort"]
"""What becomes of requests in flight when new weights come (see TrainerConfig.publish_in_flight)."""


@dataclass(frozen=True)
class Target:
    """One replica. hosts: that its processes are on. ranks: processes of one engine, over which layers are split. dp:
    engines behind the one endpoint. quantization: of its weights. in_ring: it shares GPUs with others in turn."""

    name: str
    url: str
    hosts: tuple[str, ...]
    ranks: int = 1
    dp: int = 1
    quantization: str | None = None
    in_ring: bool = False


def hindrance(wanted: str, *, dp: int, quantization: str | None, in_ring: bool) -> str | None:
    """Why weights cannot go that way to a replica that is like this, and what to use instead; None if they can."""
    if wanted in ("shm", "collective") and dp > 1:
        return f"has dp={dp}, and engines behind one endpoint take new weights from disk only; use 'disk' or 'auto'"
    if wanted in ("shm", "collective") and quantization:
        return f"has quantised weights ({quantization}), which are made anew from a folder only; use 'disk' or 'auto'"
    if wanted == "collective" and in_ring:
        return "is in a ring, where it cannot receive while the trainer computes; use 'disk', 'shm' or 'auto'"
    return None


def choose(wanted: str, host: str, targets: Sequence[Target]) -> str:
    """`disk`, `shm` or `collective`. host: the trainer's first rank is there. Raises ValueError where the way that is
    wanted cannot be gone, naming the replica."""
    elsewhere = [t for t in targets if set(t.hosts) != {host}]
    if wanted == "auto":
        way = "collective" if elsewhere else "shm"
        return "disk" if any(_hindrance(way, t) for t in targets) else way
    for target in targets:
        if why := _hindrance(wanted, target):
            raise ValueError(f"publish={wanted!r}: {target.name} {why}")
    if wanted == "shm" and elsewhere:
        target = elsewhere[0]
        raise ValueError(
            f"publish='shm': {target.name} is on {', '.join(target.hosts)}, the trainer on {host}, and they share no "
            "memory; use 'collective' or 'disk'"
        )
    return wanted


def _hindrance(wanted: str, target: Target) -> str | None:
    return hindrance(wanted, dp=target.dp, quantization=target.quantization, in_ring=target.in_ring)
