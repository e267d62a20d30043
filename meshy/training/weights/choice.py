"""Which way weights go: decided once, from where the replicas are and what they are. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


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


def choose(wanted: str, host: str, targets: Sequence[Target]) -> str:
    """`disk`, `shm` or `collective`. host: the trainer's first rank is there. Raises ValueError where the way that is
    wanted cannot be gone, naming the replica."""
    several = [t for t in targets if t.dp > 1]
    elsewhere = [t for t in targets if set(t.hosts) != {host}]
    ringed = [t for t in targets if t.in_ring]
    if wanted == "auto":
        if several or (elsewhere and ringed) or any(t.quantization for t in targets):
            return "disk"
        return "collective" if elsewhere else "shm"
    if wanted != "disk" and several:
        raise ValueError(
            f"publish={wanted!r}: {several[0].name} has dp={several[0].dp}, and engines behind one endpoint take new "
            "weights from disk only; use 'disk'"
        )
    if wanted == "shm" and elsewhere:
        target = elsewhere[0]
        raise ValueError(
            f"publish='shm': {target.name} is on {', '.join(target.hosts)}, the trainer on {host}, and they share no "
            "memory; use 'collective' or 'disk'"
        )
    if wanted == "collective" and ringed:
        raise ValueError(
            f"publish='collective': {ringed[0].name} is in a ring, where it cannot receive while the trainer computes; "
            "use 'disk' or 'shm'"
        )
    return wanted
