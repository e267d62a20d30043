"""The soft overlong punishment of DAPO (arXiv 2503.14476), added to the reward of long responses. Torch-free."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """Responses that end within the last `buffer` tokens of what is allowed lose up to `factor` of their reward."""

    buffer: int
    factor: float = 1.0

    def faults(self) -> list[str]:
        """What is wrong with it, by field; each says what to change."""
        limits: tuple[tuple[bool, str, Any, str], ...] = (
            (self.buffer >= 1, "buffer", self.buffer, "at least 1 token"),
            (self.factor >= 0, "factor", self.factor, "0 or more"),
        )
        return [f"overlong.{name}: expected {what}, got {value}" for fine, name, value, what in limits if not fine]


def penalty(length: int, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """0 up to max_length - buffer tokens, falling in a line to -factor at max_length, and -factor beyond."""
    over = length - (max_length - buffer)
    return -factor * min(max(over / buffer, 0.0), 1.0)
