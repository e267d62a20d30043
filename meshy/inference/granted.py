"""Which weights a replica takes up when its ring's token comes back. Pure, but for a look whether a folder is there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Weights(NamedTuple):
    """A weight version and the folder, in Hugging Face format, that holds it."""

    version: int
    folder: Path


class GrantError(RuntimeError):
    """A replica cannot serve weights as new as those that came with the token; says which and why."""


def granted(payload: Mapping[str, Any]) -> Weights | None:
    """The weights that a token's payload names, if any. Raises GrantError where that makes no sense."""
    named = payload.get("weights")
    if named is None:
        return None
    try:
        return Weights(int(named["version"]), Path(named["folder"]))
    except (KeyError, TypeError, ValueError) as error:
        raise GrantError(f"the token's payload should name weights by version and folder, not {named!r}") from error


def to_load(grant: Weights | None, served: int, source: Weights, keeps: bool) -> Weights | None:
    """What a replica that served version `served` must load; None where the weights that it freed are to come back.

    source: what it was last given to load. keeps: whether freed weights can come back. Raises GrantError.
    """
    if grant is not None and grant.version > served:
        return there(grant)
    if keeps:
        return None
    if grant is not None and grant.version == served:
        return there(grant)
    if source.version == served:
        return there(source)
    raise GrantError(
        f"weights v{served}, which were served, were given up with the GPU, and no folder holds them: the last one "
        f"that was loaded, {source.folder}, holds v{source.version}. Set enable_weights_cpu_backup=true in "
        "inference.server_args, so that SGLang keeps a copy"
    )


def there(weights: Weights) -> Weights:
    """The same. Raises GrantError where their folder is gone."""
    if not weights.folder.is_dir():
        raise GrantError(
            f"weights v{weights.version}, which are to be served now that the ring's token is here, should lie in "
            f"{weights.folder}, but there is no such folder on this host"
        )
    return weights


def check_served(grant: Weights | None, served: int) -> None:
    """Raises GrantError where older weights are served than were granted."""
    if grant is not None and served < grant.version:
        raise GrantError(
            f"the token grants weights v{grant.version} ({grant.folder}), but the engine serves v{served}; it must not "
            "go on with older ones"
        )
