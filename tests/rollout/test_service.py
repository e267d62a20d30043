"""Rollout end to end: the real queue, the real engine, real reward workers; the test plays the trainer."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from meshy.data.order import DataOrder
from meshy.data.prompts import Chat
from meshy.observe.jsonl import read_jsonl
from meshy.recipe import Sampling
from meshy.rollout.config import RolloutConfig
from meshy.rollout.group import GroupFailed
from meshy.rollout.pacing import GateError, NothingSurvives
from meshy.rollout.preflight import load_task
from meshy.rollout.service import StaleTokens
from tests.rollout.play import Play, Trained
from tests.rollout.roles import HERE, MODEL, recipe_of

pytestmark = pytest.mark.e2e


def texts(trained: Trained) -> list[tuple[int, str]]:
    return sorted((line["position"], line["response"]) for line in trained.trajectories)


def check_lock_step(trained: Trained) -> None:
    """Batches are whole groups, and every token that the policy wrote was written by the version that is trained."""
    uids: set[str] = set()
    for version, batch in enumerate(trained.batches):
        size = trained.service.config.group_size
        assert set(Counter(batch["group_id"]).values()) == {size}
        assert not uids & set(batch["uid"])
        uids |= set(batch["uid"])
        for mask, versions in zip(batch["loss_mask"], batch["token_versions"], strict=True):
            assert mask.any() and set(versions[mask].tolist()) == {version} and not versions[~mask].any()


def test_each_position_is_trained_once_under_the_version_that_wrote_it(play: Play):
    recipe = recipe_of(RolloutConfig(group_size=4), seed=11)
    trained = play.run(recipe)
    check_lock_step(trained)
    assert trained.positions == [[0, 1], [2, 3], [4, 5]]

    task, chat = load_task(recipe), Chat(Path(MODEL))
    order = DataOrder(len(task.train), recipe.seed)
    for batch in trained.batches:
        for i, position in enumerate(batch["position"].tolist()):
            example = task.train[order.index(position)]
            prompt, tokens, mask = chat.encode(example), batch["tokens"][i], batch["loss_mask"][i]
            assert batch["prompt_id"][i] == example.id
            assert (
                tokens[: len(prompt)].tolist() == prompt and not mask[: len(prompt)].any() and mask[len(prompt) :].all()
            )
            assert 1 <= mask.sum() <= recipe.sampling.max_new_tokens
            assert (batch["rollout_logprobs"][i][mask] <= 0).all() and not batch["rollout_logprobs"][i][~mask].any()
            response = chat.decode(tokens[mask].tolist())
            assert batch["reward"][i] == len(response)
            assert batch["truncated"][i] == (batch["finish_reason"][i] == "length")
        assert (batch["t_sent"] <= batch["t_generated"]).all() and (batch["t_generated"] <= batch["t_rewarded"]).all()

    first, last = trained.evaluations
    assert (first["weight_version"], last["weight_version"]) == (0, 3)
    assert first["count"] == last["count"] == 4
    assert first["accuracy"] == last["accuracy"]  # the same weights under two numbers, answered greedily
    assert len(trained.trajectories) == 24 and {line["step"] for line in trained.trajectories} == {1, 2, 3}
    names = {line["name"] for line in read_jsonl(trained.folder.timeline_of("rollout.0"))}
    assert names == {"reward", "generate"}
    assert trained.service.health()["groups_completed"] == 6


def test_the_same_seed_gives_the_same_texts_and_those_of_a_group_differ(play: Play):
    recipe = recipe_of(RolloutConfig(group_size=8, evaluate=False), steps=1, deterministic=True, seed=5)
    first, second = texts(play.run(recipe)), texts(play.run(recipe))
    assert first == second
    assert len({text for _, text in first}) > 1


def test_groups_whose_reward_fails_are_replaced_and_counted(play: Play):
    config = RolloutConfig(group_size=4, evaluate=False)
    recipe = recipe_of(config, data_options={"train": 12, "reward": f"{HERE}:failing_for_some"})
    trained = play.run(recipe)
    check_lock_step(trained)
    order = DataOrder(12, recipe.seed)
    failing = [p for p in range(6) if order.index(p) % 3 == 0]
    used = [position for positions in trained.positions for position in positions]
    assert failing and sorted(p for p in used if p < 6) == [p for p in range(6) if p not in failing]
    assert len(used) == 6 and all(order.index(p) % 3 != 0 for p in used)
    assert trained.service.pacing.failures["reward error"] >= len(failing)


@pytest.mark.parametrize(
    ("deadlines", "failure"),
    [
        ({"reward_deadline": 0.4}, "reward timeout"),
        ({"reward_deadline": 60.0, "group_deadline": 2.0, "reward_workers": 4}, "group deadline"),
    ],
)
def test_a_reward_that_hangs_costs_its_group_and_no_more(play: Play, deadlines, failure):
    config = RolloutConfig(group_size=2, evaluate=False, **deadlines)
    recipe = recipe_of(config, steps=1, data_options={"train": 4, "reward": f"{HERE}:hanging_for_one"})
    trained = play.run(recipe)
    order = DataOrder(4, recipe.seed)
    hanging = next(p for p in range(4) if order.index(p) == 1)
    assert trained.positions[0][:3] == [p for p in range(4) if p != hanging] and len(trained.positions[0]) == 4
    assert set(trained.service.pacing.failures) == {failure}


def test_once_a_sample_has_failed_the_others_of_its_group_are_not_scored(play: Play, caplog):
    config = RolloutConfig(group_size=8, evaluate=False, reward_deadline=0.4, max_failed_groups=0)
    recipe = recipe_of(config, steps=1, data_options={"reward": f"{HERE}:always_hanging"})
    with pytest.raises(NothingSurvives, match=r"reward timeout \(1\)") as caught:
        play.run(recipe)
    assert isinstance(reason := caught.value.__context__, GroupFailed) and reason.__context__ is None
    scored = [record for record in caplog.records if record.name == "meshy.rewards.pool"]
    assert 1 <= len(scored) <= config.reward_workers


def test_a_reward_that_always_fails_ends_the_run_with_counts(play: Play):
    config = RolloutConfig(group_size=4, evaluate=False, max_failed_groups=5)
    recipe = recipe_of(config, data_options={"reward": f"{HERE}:always_failing"})
    with pytest.raises(
        NothingSurvives, match=r"6 groups in a row have failed.*0 groups were completed.*reward error \(6\)"
    ):
        play.run(recipe)


def test_groups_that_take_too_long_are_replaced_until_too_many_have(play: Play):
    config = RolloutConfig(group_size=4, evaluate=False, max_failed_groups=1, group_deadline=0.001)
    with pytest.raises(NothingSurvives, match=r"group deadline \(2\)"):
        play.run(recipe_of(config))


def test_groups_of_one_over_several_epochs_of_few_prompts(play: Play):
    config = RolloutConfig(group_size=1, evaluate=False, allow_repeats=True)
    trained = play.run(recipe_of(config, data_options={"train": 3}))
    check_lock_step(trained)
    assert trained.positions == [list(range(8 * j, 8 * j + 8)) for j in range(3)]
    ids = Counter(id for batch in trained.batches for id in batch["prompt_id"])
    assert ids == {"train-0": 8, "train-1": 8, "train-2": 8}


def test_a_stop_gate_before_the_last_batch_is_honoured(play: Play):
    trained = play.run(recipe_of(RolloutConfig(group_size=4), steps=50), steps=1)
    assert trained.positions == [[0, 1]]
    assert [row["weight_version"] for row in trained.evaluations] == [0, 1]
    assert trained.service.health()["groups_in_flight"] == 0


def test_evaluations_at_every_gate_of_some_prompts_and_a_bound_on_samples_in_flight(play: Play):
    config = RolloutConfig(group_size=2, eval_every=2, eval_prompts=3, max_in_flight=2, log_trajectories=0.5)
    options = {"reward": f"{HERE}:failing_for_one_held_out"}
    trained = play.run(recipe_of(config, steps=4, data_options=options))
    check_lock_step(trained)
    assert all(row["accuracy"] == pytest.approx(2 / 3) for row in trained.evaluations)  # no score counts as 0
    assert [(row["weight_version"], row["count"]) for row in trained.evaluations] == [(0, 3), (2, 3), (4, 3)]
    assert sorted({line["position"] for line in trained.trajectories}) == list(range(1, 16, 2))


def test_truncated_answers_are_marked(play: Play):
    config = RolloutConfig(group_size=8, evaluate=False)
    trained = play.run(recipe_of(config, steps=1, sampling=Sampling(max_new_tokens=1)))
    batch = trained.batches[0]
    assert all(mask.sum() == 1 for mask in batch["loss_mask"])
    assert batch["truncated"].any()
    assert all(t == (r == "length") for t, r in zip(batch["truncated"].tolist(), batch["finish_reason"], strict=True))


def test_weights_that_are_not_those_of_the_gate_end_the_run(play: Play):
    def late(step: int) -> None:
        if step == 1:
            play.trainer.engine.load(MODEL, 7)

    with pytest.raises(StaleTokens, match=r"versions \[7\], but a window of 1 allows 1 to 1 in batch 1"):
        play.run(recipe_of(RolloutConfig(group_size=4, evaluate=False)), before_gate=late)


def test_an_engine_that_went_back_to_older_weights_writes_nothing_until_it_has_the_gates(play: Play):
    """It serves version 0 when the gate of version 1 opens, as one that has restarted may."""

    def update() -> None:
        while not play.service.health().get("detail"):
            time.sleep(0.02)
        told.append(play.service.health()["detail"])
        play.trainer.engine.load(MODEL, 1)

    def goes_back(step: int) -> None:
        if step == 1:
            play.trainer.engine.load(MODEL, 0)
            play.service.tell("ready")
            updating.start()

    told: list[str] = []
    updating = threading.Thread(target=update)
    recipe = recipe_of(RolloutConfig(group_size=4, eval_every=1))
    check_lock_step(play.run(recipe, before_gate=goes_back))
    updating.join(10)
    assert "0 of 1 inference replicas: http" in told[0] and "serves weights v0, v1 is required" in told[0]


def test_the_numbers_of_each_engine_are_shown(play: Play):
    seen: list[dict[str, float]] = []
    trained = play.run(
        recipe_of(RolloutConfig(group_size=4, evaluate=False)),
        before_gate=lambda step: seen.append(play.service.metrics()),
    )
    written = sum(int(mask.sum()) for batch in trained.batches for mask in batch["loss_mask"])
    last = seen[-1]
    assert (
        last["inference/0/tokens"] == written and last["inference/0/answers"] == 24 and last["inference/0/queue"] == 0
    )
    assert last["inference/0/tokens_per_second"] > 0 and 0 <= last["inference/0/cache_hit_rate"] <= 1
    assert last["inference/0/failures"] == last["inference/0/stale"] == last["inference/0/seconds_out"] == 0
    assert last["rollout/client_seconds"] > 0
    (health,) = play.service.health()["inference"].values()
    assert health["tokens"] == written and "detail" not in play.service.health()


def test_a_gap_in_the_gates_ends_the_run_and_shows_both(play: Play):
    def skip(step: int) -> None:
        if step == 1:
            play.trainer.gate("skipped", 0, 0, 0, stop=False)

    with pytest.raises(GateError, match="started anew"):
        play.run(recipe_of(RolloutConfig(group_size=4, evaluate=False)), before_gate=skip)
