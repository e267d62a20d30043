"""Greedy answers to prompts that training never sees."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from meshy.data.prompts import PromptTokens
from meshy.rollout.episode import Episode
from meshy.rollout.group import GroupFailed, GroupMaker, greedy
from meshy.service.tasks import together

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """accuracy: mean reward over `count` prompts; one that could not be scored counts 0. Lengths in tokens."""

    weight_version: int
    accuracy: float
    count: int
    seconds: float
    response_length_mean: float

    def row(self, gate_step: int) -> dict[str, list[Any]]:
        """One row of partition `eval`."""
        return {
            "uid": [f"eval.{gate_step}"],
            "weight_version": [self.weight_version],
            "accuracy": [self.accuracy],
            "count": [self.count],
            "seconds": [self.seconds],
            "response_length_mean": [self.response_length_mean],
        }


async def evaluate(maker: GroupMaker, prompts: PromptTokens, count: int | None, weight_version: int) -> Evaluation:
    """Answer the first `count` prompts (None: all). GroupFailed if one cannot be generated at all."""
    started = time.monotonic()
    rows = range(len(prompts.examples) if count is None else min(count, len(prompts.examples)))
    answers = await together(_answer(maker, prompts, row) for row in rows)
    versions = {version for _, episode in answers for version in episode.written_versions}
    if versions != {weight_version}:
        log.warning("weights v%d: answers were written by versions %s", weight_version, sorted(versions))
    unscored = sum(score is None for score, _ in answers)
    if unscored:
        log.warning("%d of %d held-out answers could not be scored; they count as 0", unscored, len(rows))
    return Evaluation(
        weight_version=weight_version,
        accuracy=sum(score or 0.0 for score, _ in answers) / len(rows),
        count=len(rows),
        seconds=time.monotonic() - started,
        response_length_mean=sum(len(episode.response) for _, episode in answers) / len(rows),
    )


async def _answer(maker: GroupMaker, prompts: PromptTokens, row: int) -> tuple[float | None, Episode]:
    """The score of one answer, None where the reward gave none, and the answer."""
    episode = await maker.answer(prompts[row], greedy(maker.sampling), key=f"eval.{row}", held_out=True)
    try:
        score = await maker.score(prompts.examples[row], episode, maker.chat.decode(episode.response))
    except GroupFailed:  # the reward pool has logged why
        return None, episode
    return score, episode
