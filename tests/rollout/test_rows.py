"""From completions to rows: masks, log-probs and versions stand exactly on what the policy wrote."""

import asyncio
from typing import Any

import numpy as np

from meshy.columns import ANY_BATCH, TRAIN_COLUMNS
from meshy.generation import Completion
from meshy.generation.candidates import Candidates
from meshy.queue.codec import pack
from meshy.rollout.config import RolloutConfig
from meshy.rollout.episode import Episode, single_turn
from meshy.rollout.group import Group, Sample, sample_seed
from meshy.rollout.rows import group_rows, is_logged, trajectory_lines
from tests.rollout.roles import example, recipe_of

END = 1  # also the padding token of the models in the tests


def completion(tokens: list[int], finish_reason: str = "stop", version: int = 3) -> Completion:
    return Completion(
        tokens=tokens,
        logprobs=[-0.5 - i for i in range(len(tokens))],
        versions=[version] * len(tokens),
        finish_reason=finish_reason,
        text="",
        replica=0,
    )


def episode(prompt: list[int], answer: Completion) -> Episode:
    async def write(tokens: list[int]) -> Completion:
        assert tokens == prompt
        return answer

    return asyncio.run(single_turn(prompt, write))


def with_candidates(answer: Completion, k: int = 2) -> Completion:
    """Candidates that tell which token they belong to: its id, and ids beyond it."""
    ids = np.array([[token + i for i in range(k)] for token in answer.tokens], dtype=np.int32)
    answer.candidates = Candidates(ids, np.full(ids.shape, -0.25, dtype=np.float32))
    return answer


def group(*answers: Completion, **fields: Any) -> Group:
    samples = tuple(
        Sample(episode=episode([7, 8, END], a), text=f"text {i}", reward=i / 2) for i, a in enumerate(answers)
    )
    times = {"t_sent": 1.0, "t_generated": 2.0, "t_rewarded": 3.0}
    return Group(position=5, example=example("p5", "2+2"), samples=samples, **times, **fields)


def test_the_mask_is_true_exactly_on_what_the_policy_wrote():
    made = episode([7, 8, 9], completion([4, 5, END]))
    assert made.tokens == [7, 8, 9, 4, 5, END]
    assert made.loss_mask == [False] * 3 + [True] * 3
    assert made.logprobs == [0, 0, 0, -0.5, -1.5, -2.5]
    assert made.versions == [0, 0, 0, 3, 3, 3]
    assert (made.response, made.n_turns, made.truncated, made.written_versions) == ([4, 5, END], 1, False, {3})


def test_an_answer_of_one_token_counts():
    assert episode([7], completion([END])).loss_mask == [False, True]


def test_an_answer_without_end_is_marked_as_truncated_and_keeps_all_its_tokens():
    made = episode([7], completion([4, 5], finish_reason="length"))
    assert made.truncated and made.finish_reason == "length" and sum(made.loss_mask) == 2


def test_an_end_token_that_is_also_the_padding_is_trained_wherever_it_was_written():
    made = episode([7, END], completion([4, END, 5, END]))
    assert made.loss_mask == [False, False, True, True, True, True]
    assert made.response == [4, END, 5, END]


def test_several_turns_mask_what_the_policy_was_given_between_them():
    made = Episode.begin([7, 8])
    made.wrote(completion([4], version=1))
    made.read([9, 9])
    made.wrote(completion([5, END], version=2))
    assert made.tokens == [7, 8, 4, 9, 9, 5, END]
    assert made.loss_mask == [False, False, True, False, False, True, True]
    assert made.versions == [0, 0, 1, 0, 0, 2, 2] and made.n_turns == 2


def test_candidates_stand_on_what_the_policy_wrote_in_every_turn():
    made = Episode.begin([7, 8])
    made.wrote(with_candidates(completion([4], version=1)))
    made.read([9, 9])
    made.wrote(with_candidates(completion([5, END], version=2)))
    found = made.candidates
    assert found is not None and len(found) == len(made.tokens)
    assert found.ids.tolist() == [[0, 0], [0, 0], [4, 5], [0, 0], [0, 0], [5, 6], [END, END + 1]]
    assert found.logprobs.any(axis=1).tolist() == made.loss_mask
    assert episode([7], completion([4])).candidates is None


def test_rows_hold_what_the_recipe_asks_for_beside_the_rest():
    answers = with_candidates(completion([4, END]), 3), with_candidates(completion([5]), 3)
    greedy = Sample(episode=episode([7, 8, END], completion([6, 6, END])), text="greedy", reward=0.75)
    rows = group_rows(group(*answers, greedy=greedy, route="math"), batch=2)
    config = RolloutConfig(candidates=3, greedy_baseline=True, routes=("code", "math"))
    declared = {column.name: column for column in config.produces(recipe_of())[0].columns}
    packed = pack(declared, rows)
    assert set(declared) - set(rows) == {"route.code"} and all(len(c) == 2 for c in packed.values())
    assert packed["student_topk_ids"].sizes.tolist() == [[5, 3], [4, 3]]
    assert rows["student_topk_ids"][0].tolist() == [[0] * 3] * 3 + [[4, 5, 6], [END, END + 1, END + 2]]
    assert rows["student_topk_logprobs"][1].tolist() == [[0] * 3] * 3 + [[-0.25] * 3]
    assert rows["greedy_reward"] == [0.75, 0.75] and rows["reward"] == [0.0, 0.5]
    assert rows["route.math"] == [True, True]


def test_rows_without_these_are_as_they_were():
    assert set(group_rows(group(completion([4])), batch=0)) == {column.name for column in TRAIN_COLUMNS}
    assert RolloutConfig().produces(recipe_of())[0].columns == TRAIN_COLUMNS


def test_rows_hold_every_column_as_the_queue_takes_it():
    late = completion([5], finish_reason="length", version=4)
    rows = group_rows(group(completion([4, END]), late), batch=2, lost=3)
    packed = pack({column.name: column for column in TRAIN_COLUMNS}, rows)
    assert set(packed) == {column.name for column in TRAIN_COLUMNS} and all(len(c) == 2 for c in packed.values())
    assert rows["uid"] == ["5.0", "5.1"] and rows["group_id"] == ["5", "5"] and rows["prompt_id"] == ["p5", "p5"]
    assert rows["batch"] == [2, 2] and rows["group_size"] == [2, 2] and rows["lost"] == [3, 0]
    assert rows["n_tokens"] == [5, 4] and rows["n_written"] == [2, 1] and rows["oldest_version"] == [3, 4]
    assert rows["reward"] == [0.0, 0.5] and rows["truncated"] == [False, True]
    assert (rows["t_sent"], rows["t_generated"], rows["t_rewarded"]) == ([1.0] * 2, [2.0] * 2, [3.0] * 2)


def test_a_group_of_one():
    rows = group_rows(group(completion([4])), batch=0)
    assert rows["uid"] == ["5.0"] and rows["lost"] == [0]


def test_the_oldest_version_is_that_of_a_token_that_the_policy_wrote():
    interrupted = completion([4, 5])
    interrupted.versions = [7, 8]
    assert group_rows(group(interrupted), batch=8)["oldest_version"] == [7]


def test_a_trajectory_without_a_batch_has_no_step():
    (line,) = trajectory_lines(group(completion([4])), batch=ANY_BATCH)
    assert line["step"] is None


def test_trajectories_show_the_route_where_there_is_one():
    (line,) = trajectory_lines(group(completion([4]), route="math"), batch=0)
    (other,) = trajectory_lines(group(completion([4])), batch=0)
    assert line["route"] == "math" and "route" not in other


def test_trajectories_show_what_was_said_and_by_which_weights():
    first, second = trajectory_lines(group(completion([4, END]), completion([5], finish_reason="length")), batch=2)
    assert first["step"] == 3 and first["prompt"] == [{"role": "user", "content": "2+2"}]
    assert (first["response"], first["response_tokens"], first["weight_versions"]) == ("text 0", 2, [3, 3])
    assert (second["finish_reason"], second["reward"]) == ("length", 0.5)


def test_the_logged_share_is_spread_over_the_positions():
    assert [p for p in range(12) if is_logged(p, 0.25)] == [3, 7, 11]
    assert all(is_logged(p, 1.0) for p in range(5)) and not any(is_logged(p, 0.0) for p in range(5))


def test_seeds_repeat_and_differ_within_a_group_between_groups_and_between_runs():
    seeds = [sample_seed(s, p, i) for s in range(3) for p in range(20) for i in range(8)]
    assert seeds == [sample_seed(s, p, i) for s in range(3) for p in range(20) for i in range(8)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**31 for seed in seeds)
