"""The agent loop of one sample: token in, token out.

An episode is a sequence of token ids that only ever grows: what the policy wrote is kept as it was written and never
tokenised again, so the trainer sees exactly what was sampled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from meshy.generation import Completion
from meshy.generation.candidates import Candidates, joined, spread

Write = Callable[[list[int]], Awaitable[Completion]]
"""Has the policy go on from these tokens."""


@dataclass
class Episode:
    """All per-token lists have the length of `tokens`; they are 0 where `loss_mask` is false. written_candidates: of
    what the policy wrote, turn by turn, where they were asked for."""

    tokens: list[int]
    prompt_length: int
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    written_candidates: list[Candidates] = field(default_factory=list)
    n_turns: int = 0
    finish_reason: str = ""

    @classmethod
    def begin(cls, prompt: Sequence[int]) -> Episode:
        episode = cls(tokens=[], prompt_length=len(prompt))
        episode.read(prompt)
        return episode

    def read(self, tokens: Sequence[int]) -> None:
        """Tokens that the policy is given: the prompt, an answer of its surroundings."""
        self.tokens.extend(tokens)
        self.loss_mask.extend([False] * len(tokens))
        self.logprobs.extend([0.0] * len(tokens))
        self.versions.extend([0] * len(tokens))

    def wrote(self, completion: Completion) -> None:
        """Tokens that the policy wrote, its end token among them."""
        self.tokens.extend(completion.tokens)
        self.loss_mask.extend([True] * len(completion.tokens))
        self.logprobs.extend(completion.logprobs)
        self.versions.extend(completion.versions)
        if completion.candidates is not None:
            self.written_candidates.append(completion.candidates)
        self.n_turns += 1
        self.finish_reason = completion.finish_reason

    @property
    def response(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def candidates(self) -> Candidates | None:
        """Of all tokens, 0 where `loss_mask` is false; None where they were not asked for."""
        return spread(joined(self.written_candidates), self.loss_mask) if self.written_candidates else None

    @property
    def written_versions(self) -> set[int]:
        """The weight versions that wrote the response."""
        return {version for version, mask in zip(self.versions, self.loss_mask, strict=True) if mask}

    @property
    def truncated(self) -> bool:
        """The response was cut off by its length."""
        return self.finish_reason == "length"


async def single_turn(prompt: Sequence[int], write: Write) -> Episode:
    """One answer to one prompt."""
    episode = Episode.begin(prompt)
    episode.wrote(await write(episode.tokens))
    return episode
