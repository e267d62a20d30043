"""A finished group as rows of partition `train`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from meshy.rollout.group import Group
from meshy.rollout.routes import column_of


def group_rows(group: Group, batch: int, lost: int = 0) -> dict[str, list[Any]]:
    """Every column of TRAIN_COLUMNS, one entry a sample; also those of candidates, baseline and route where the group
    has them. batch: see column `batch`. lost: groups that gave no rows since the last that did. A uid is the group's
    position and the sample's number: no position gives rows twice, so no two rows of a run share one."""
    size = len(group.samples)
    episodes = [sample.episode for sample in group.samples]
    columns: dict[str, list[Any]] = {
        "uid": [f"{group.position}.{index}" for index in range(size)],
        "prompt_id": [group.example.id] * size,
        "group_id": [str(group.position)] * size,
        "group_size": [size] * size,
        "position": [group.position] * size,
        "batch": [batch] * size,
        "tokens": [episode.tokens for episode in episodes],
        "loss_mask": [episode.loss_mask for episode in episodes],
        "rollout_logprobs": [episode.logprobs for episode in episodes],
        "token_versions": [episode.versions for episode in episodes],
        "n_tokens": [len(episode.tokens) for episode in episodes],
        "n_written": [sum(episode.loss_mask) for episode in episodes],
        "oldest_version": [min(episode.written_versions) for episode in episodes],
        "reward": [sample.reward for sample in group.samples],
        "finish_reason": [episode.finish_reason for episode in episodes],
        "truncated": [episode.truncated for episode in episodes],
        "n_turns": [episode.n_turns for episode in episodes],
        "lost": [lost] + [0] * (size - 1),
        "t_sent": [group.t_sent] * size,
        "t_generated": [group.t_generated] * size,
        "t_rewarded": [group.t_rewarded] * size,
    }
    candidates = [found for episode in episodes if (found := episode.candidates) is not None]
    if candidates:
        columns["student_topk_ids"] = [found.ids for found in candidates]
        columns["student_topk_logprobs"] = [found.logprobs for found in candidates]
    if group.greedy is not None:
        columns["greedy_reward"] = [group.greedy.reward] * size
    if group.route is not None:
        columns[column_of(group.route).name] = [True] * size
    return columns


def trajectory_lines(group: Group, batch: int) -> Iterable[Mapping[str, Any]]:
    """A line of trajectories.jsonl for each sample. step: of metrics.jsonl, the one that trains it; None where that is
    not known yet."""
    answer = group.example.answer  # anything that pickles, for the reward's sake; not all of it is JSON
    for index, sample in enumerate(group.samples):
        episode, versions = sample.episode, sample.episode.written_versions
        yield {
            "step": batch + 1 if batch >= 0 else None,
            "uid": f"{group.position}.{index}",
            "position": group.position,
            "prompt_id": group.example.id,
            "prompt": [dict(message) for message in group.example.messages],
            "response": sample.text,
            "reward": sample.reward,
            "answer": answer if isinstance(answer, (str, int, float, type(None))) else str(answer),
            "response_tokens": sum(episode.loss_mask),
            "weight_versions": [min(versions), max(versions)],
            "finish_reason": episode.finish_reason,
            **({} if group.route is None else {"route": group.route}),
        }


def is_logged(position: int, share: float) -> bool:
    """Whether a group is among the share (0..1) that is written down: spread evenly over the positions."""
    return int((position + 1) * share) > int(position * share)
