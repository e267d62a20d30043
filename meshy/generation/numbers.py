"""What a client has seen of one replica, in numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class ReplicaNumbers:
    """Counted since the client was made.

    answers: parts that were used. tokens: written in them. prompt_tokens, cached_tokens: read for them, and how many of
    those the replica still held. retries: parts that had to be sent again, here or elsewhere. stale: answers that were
    discarded, since older weights wrote them. failures: how often it went out of rotation because it could not be used.
    """

    answers: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retries: int = 0
    stale: int = 0
    failures: int = 0
    in_flight: int = 0
    _busy: float = 0.0
    _busy_since: float = 0.0

    def sent(self) -> None:
        if not self.in_flight:
            self._busy_since = time.monotonic()
        self.in_flight += 1

    def came_back(self) -> None:
        """A request that was sent is under way no more, however it ended."""
        self.in_flight -= 1
        if not self.in_flight:
            self._busy += time.monotonic() - self._busy_since

    def used(self, meta: Mapping[str, Any], tokens: int) -> None:
        """An answer with that `meta_info`."""
        self.answers += 1
        self.tokens += tokens
        self.prompt_tokens += meta.get("prompt_tokens") or 0
        self.cached_tokens += meta.get("cached_tokens") or 0

    @property
    def tokens_per_second(self) -> float:
        """Over the time in which it had requests of this client."""
        busy = self._busy + (time.monotonic() - self._busy_since if self.in_flight else 0.0)
        return self.tokens / busy if busy > 0 else 0.0

    @property
    def cache_hit_rate(self) -> float:
        """The share of prompt tokens that the replica still held."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def to_json(self) -> dict[str, float]:
        names = ("in_flight", "answers", "tokens", "retries", "stale", "failures")
        return {
            "tokens_per_second": self.tokens_per_second,
            "cache_hit_rate": self.cache_hit_rate,
            **{name: getattr(self, name) for name in names},
        }
