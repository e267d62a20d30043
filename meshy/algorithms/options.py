"""The options of a loss or an estimator: what the recipe gives, and its own defaults for the rest."""

import math
from typing import Any

from meshy.algorithms.interface import LossConfig


class OptionError(ValueError):
    """An option that cannot be. name: of the option."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(why)
        self.name = name


def options_of(config: LossConfig, reader: str, **defaults: Any) -> dict[str, Any]:
    """Every option of the loss called `reader`. Raises OptionError for one that it has not, naming those that it has,
    and for a value of another kind than the default."""
    unknown = sorted(set(config.options) - set(defaults))
    if unknown:
        known = ", ".join(f"{name} (default {value!r})" for name, value in defaults.items()) or "none"
        raise OptionError(unknown[0], f"{reader} has no option {unknown[0]!r}; its options are {known}")
    for name, value in config.options.items():
        check_option(reader, name, value, defaults[name])
    return {**defaults, **config.options}


def check_option(reader: str, name: str, value: Any, default: Any) -> None:
    """OptionError where a value is of another kind than the default of its option; a number's may be None, too."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    match default:
        case bool():
            fine, kind = isinstance(value, bool), "true or false"
        case None:
            fine, kind = value is None or number, "a number, or none"
        case float() | int():
            fine, kind = number, "a number"
        case str():
            fine, kind = isinstance(value, str), "a text"
        case _:
            return
    if not fine:
        raise OptionError(name, f"option {name!r} of {reader}: expected {kind}, got {value!r}")
