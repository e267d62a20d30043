"""The samples of one prompt, generated and scored together."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshy.data.prompts import Chat
from meshy.data.task import Example
from meshy.generation import Completion, GenerationClient, GenerationError
from meshy.recipe import Sampling
from meshy.rewards.pool import RewardPool
from meshy.rewards.sample import RewardSample
from meshy.rollout.episode import Episode, single_turn
from meshy.service.tasks import together


class GroupFailed(Exception):
    """A group that gives no rows. reason: one word or two, to be counted; detail: for the log."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One scored response. text: special tokens left out."""

    episode: Episode
    text: str
    reward: float


@dataclass(frozen=True, kw_only=True)
class Group:
    """The scored responses to one prompt; times in unix seconds (see the columns of `train`). greedy: one that is no
    sample, but the others' baseline. route: of the prompt."""

    position: int
    example: Example
    samples: tuple[Sample, ...]
    t_sent: float
    t_generated: float
    t_rewarded: float
    greedy: Sample | None = None
    route: str | None = None

    @property
    def responses(self) -> tuple[Sample, ...]:
        return self.samples if self.greedy is None else (*self.samples, self.greedy)


def greedy(sampling: Sampling) -> Sampling:
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)


def sample_seed(seed: int, position: int, index: int) -> int:
    """The seed of one sample, in [0, 2^31): the same in every run, another for each sample of a group."""
    digest = hashlib.sha256(f"{seed}/{position}/{index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


@dataclass(kw_only=True)
class GroupMaker:
    """Generates and scores. One is enough for any number of groups at once.

    context_length: bound on prompt and response together, in tokens; a response may have what the prompt leaves.
    seed: in deterministic mode the run's seed; None lets the engine draw. deadline: seconds a group; None: no bound.
    candidates: the likeliest tokens to be told for each that a sample holds. baseline: have a greedy response beside
    the samples. route_of: from an example to the name of its route, or None. busy: told the name, start and end (unix
    seconds) of each piece of work.
    """

    client: GenerationClient
    pool: RewardPool
    chat: Chat
    sampling: Sampling
    context_length: int
    group_size: int
    seed: int | None = None
    deadline: float | None = None
    candidates: int = 0
    baseline: bool = False
    route_of: Callable[[Example], str | None] = lambda example: None
    busy: Callable[[str, float, float], None] = lambda name, start, end: None

    async def make(self, position: int, example: Example, prompt: Sequence[int]) -> Group:
        """A whole group, or GroupFailed when a response could not be generated or scored, or not in time. The first
        that fails ends the work on the others."""
        started = time.time()
        samplings = [self.sampling] * self.group_size + [greedy(self.sampling)] * self.baseline
        try:
            async with asyncio.timeout(self.deadline):
                done = await together(
                    self._sample(position, index, example, prompt, sampling) for index, sampling in enumerate(samplings)
                )
        except TimeoutError:
            raise GroupFailed("group deadline", f"not complete after {self.deadline:g} s") from None
        generated = max(when for _, when in done)
        self.busy("generate", started, generated)
        responses = tuple(sample for sample, _ in done)
        return Group(
            position=position,
            example=example,
            samples=responses[: self.group_size],
            t_sent=started,
            t_generated=generated,
            t_rewarded=time.time(),
            greedy=responses[self.group_size] if self.baseline else None,
            route=self.route_of(example),
        )

    async def _sample(
        self, position: int, index: int, example: Example, prompt: Sequence[int], sampling: Sampling
    ) -> tuple[Sample, float]:
        """One response, and when it was generated. It is scored at once, while the others are still being generated."""
        seed = None if self.seed is None else sample_seed(self.seed, position, index)
        candidates = self.candidates if index < self.group_size else 0
        episode = await self.answer(prompt, sampling, key=str(position), seed=seed, candidates=candidates)
        generated = time.time()
        text = self.chat.decode(episode.response)
        return Sample(episode=episode, text=text, reward=await self.score(example, episode, text)), generated

    async def answer(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        key: str,
        seed: int | None = None,
        candidates: int = 0,
        held_out: bool = False,
    ) -> Episode:
        """One episode. Requests of one key go to one replica of inference. held_out: it is not for training: it goes
        before others, and goes on where new weights interrupt it. GroupFailed where generation fails."""
        how: dict[str, Any] = {"first": True, "restart": False} if held_out else {}

        async def write(tokens: list[int]) -> Completion:
            room = min(sampling.max_new_tokens, self.context_length - len(tokens))
            return await self.client.generate(
                tokens, replace(sampling, max_new_tokens=room), seed=seed, candidates=candidates, key=key, **how
            )

        try:
            episode = await single_turn(prompt, write)
        except GenerationError as error:
            raise GroupFailed("generation", str(error)) from error
        if not episode.response:
            raise GroupFailed("empty response", f"the engine gave no token (finish reason {episode.finish_reason!r})")
        return episode

    async def score(self, example: Example, episode: Episode, text: str) -> float:
        """The reward of a response. GroupFailed where the reward gives none."""
        sample = RewardSample(
            prompt=example.messages,
            response=text,
            answer=example.answer,
            finish_reason=episode.finish_reason,
            info=example.info,
        )
        (result,) = await self.pool.score([sample])
        ended = time.time()
        self.busy("reward", ended - result.seconds, ended)
        if result.value is None:
            raise GroupFailed("reward timeout" if result.timed_out else "reward error", result.error or "no score")
        return result.value
