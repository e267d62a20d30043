"""The samples of one prompt, generated and scored together."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshy.data.task import Example
from meshy.generation import Completion, GenerationClient, GenerationError
from meshy.recipe import Sampling
from meshy.rewards.pool import RewardPool
from meshy.rewards.sample import RewardSample
from meshy.rollout.episode import Episode, single_turn
from meshy.rollout.prompts import Chat
from meshy.rollout.tasks import together


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
    """The scored responses to one prompt; times in unix seconds (see the columns of `train`)."""

    position: int
    example: Example
    samples: tuple[Sample, ...]
    t_sent: float
    t_generated: float
    t_rewarded: float


def sample_seed(seed: int, position: int, index: int) -> int:
    """The seed of one sample, in [0, 2^31): the same in every run, another for each sample of a group."""
    digest = hashlib.sha256(f"{seed}/{position}/{index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


@dataclass(kw_only=True)
class GroupMaker:
    """Generates and scores. One is enough for any number of groups at once.

    context_length: bound on prompt and response together, in tokens; a response may have what the prompt leaves.
    seed: in deterministic mode the run's seed; None lets the engine draw. deadline: seconds a group; None: no bound.
    busy: told the name, start and end (unix seconds) of each piece of work.
    """

    client: GenerationClient
    pool: RewardPool
    chat: Chat
    sampling: Sampling
    context_length: int
    group_size: int
    seed: int | None = None
    deadline: float | None = None
    busy: Callable[[str, float, float], None] = lambda name, start, end: None

    async def make(self, position: int, example: Example, prompt: Sequence[int]) -> Group:
        """A whole group, or GroupFailed when a sample could not be generated or scored, or not in time. The first
        sample that fails ends the work on the others."""
        started = time.time()
        try:
            async with asyncio.timeout(self.deadline):
                done = await together(
                    self._sample(position, index, example, prompt) for index in range(self.group_size)
                )
        except TimeoutError:
            raise GroupFailed("group deadline", f"not complete after {self.deadline:g} s") from None
        generated = max(when for _, when in done)
        self.busy("generate", started, generated)
        return Group(
            position=position,
            example=example,
            samples=tuple(sample for sample, _ in done),
            t_sent=started,
            t_generated=generated,
            t_rewarded=time.time(),
        )

    async def _sample(self, position: int, index: int, example: Example, prompt: Sequence[int]) -> tuple[Sample, float]:
        """One sample, and when it was generated. It is scored at once, while the others are still being generated."""
        seed = None if self.seed is None else sample_seed(self.seed, position, index)
        episode = await self.answer(prompt, self.sampling, key=str(position), seed=seed)
        generated = time.time()
        text = self.chat.decode(episode.response)
        return Sample(episode=episode, text=text, reward=await self.score(example, episode, text)), generated

    async def answer(
        self, prompt: Sequence[int], sampling: Sampling, *, key: str, seed: int | None = None, held_out: bool = False
    ) -> Episode:
        """One episode. Requests of one key go to one replica of inference. held_out: it is not for training: it goes
        before others, and goes on where new weights interrupt it. GroupFailed where generation fails."""
        how: dict[str, Any] = {"first": True, "restart": False} if held_out else {}

        async def write(tokens: list[int]) -> Completion:
            room = min(sampling.max_new_tokens, self.context_length - len(tokens))
            return await self.client.generate(tokens, replace(sampling, max_new_tokens=room), seed=seed, key=key, **how)

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
