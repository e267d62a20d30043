"""The options of a loss: what the recipe gives, and the loss's own defaults for the rest."""

from typing import Any

from meshy.algorithms.interface import LossConfig


def options_of(config: LossConfig, reader: str, **defaults: Any) -> dict[str, Any]:
    """Every option of the loss called `reader`. Raises ValueError naming one that it has not, and those that it has."""
    unknown = sorted(set(config.options) - set(defaults))
    if unknown:
        known = ", ".join(f"{name} (default {value!r})" for name, value in defaults.items()) or "none"
        raise ValueError(f"{reader} has no option {unknown[0]!r}; its options are {known}")
    return {**defaults, **config.options}
