"""How much one replica of rollout may have in flight. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Room:
    """samples: responses at once; tokens: prompts and the longest responses that they may get, together. None: no
    bound. One group is let in whatever its size, where nothing else is in flight."""

    samples: int | None = None
    tokens: int | None = None
    used_samples: int = 0
    used_tokens: int = 0
    _groups: dict[int, tuple[int, int]] = field(default_factory=dict)

    def fits(self, samples: int, tokens: int) -> bool:
        if not self._groups:
            return True
        fewer = self.samples is None or self.used_samples + samples <= self.samples
        return fewer and (self.tokens is None or self.used_tokens + tokens <= self.tokens)

    def take(self, position: int, samples: int, tokens: int) -> None:
        self._groups[position] = samples, tokens
        self.used_samples += samples
        self.used_tokens += tokens

    def leave(self, position: int) -> None:
        samples, tokens = self._groups.pop(position)
        self.used_samples -= samples
        self.used_tokens -= tokens
