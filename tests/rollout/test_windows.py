"""Every pace through the real queue and engine: the test plays the trainer."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from meshy.recipe import Recipe, Sampling
from meshy.rollout.config import RolloutConfig
from meshy.rollout.pacing import NothingSurvives
from tests.rollout.play import Lead, Play, Trained
from tests.rollout.roles import HERE, recipe_of

pytestmark = pytest.mark.e2e

# Any token is about as likely as another, and five in 264 end a response: lengths have a long tail.
TAILED = {
    "sampling": Sampling(temperature=100.0, max_new_tokens=100, stop_token_ids=(50, 51, 52, 53)),
    "context_length": 160,
}


def recipe_for(*, steps: int = 6, max_staleness: int | None = None, **fields) -> Recipe:
    rest = {name: fields.pop(name) for name in ("data_options", "sampling", "context_length") if name in fields}
    config = RolloutConfig(**{"group_size": 4, "evaluate": False, **fields})
    return recipe_of(config, steps=steps, max_staleness=max_staleness, **rest)


def check_whole(trained: Trained, recipe: Recipe) -> None:
    """As many batches as steps, each of whole groups, no position twice, and nothing left."""
    size = recipe.group("rollout").config.group_size
    assert [len(batch["uid"]) for batch in trained.batches] == [recipe.batch_size] * recipe.steps
    groups = Counter(name for batch in trained.batches for name in batch["group_id"])
    assert set(groups.values()) == {size} and len(groups) == recipe.steps * recipe.batch_size // size
    health = trained.service.health()
    assert health["groups_in_flight"] == health["tokens_in_flight"] == 0


def oldest_age(trained: Trained) -> int:
    """Of any token, in weight versions, when it was trained."""
    return max(
        version - min(written)
        for version, batch in enumerate(trained.versions)
        for written in batch
    )  # fmt: skip


@pytest.mark.parametrize("window", [2, 3])
def test_a_window_of_k_batches_is_at_most_k_minus_1_versions_old(play: Play, window: int):
    recipe = recipe_for(window=window, group_size=2)
    trained = play.run(recipe)
    check_whole(trained, recipe)
    assert trained.positions == [list(range(4 * j, 4 * j + 4)) for j in range(recipe.steps)]
    assert [set(batch["batch"].tolist()) for batch in trained.batches] == [{j} for j in range(recipe.steps)]
    assert 1 <= oldest_age(trained) <= window - 1
    assert {line["step"] for line in trained.trajectories} == set(range(1, recipe.steps + 1))


def test_a_window_of_2_starts_the_next_batch_before_the_first_is_trained(play: Play):
    recipe = recipe_for(window=2, steps=3)

    def script(lead: Lead) -> None:
        lead.serve(0)
        lead.gate()
        lead.until(lambda: trained_later(lead) == {0, 1})  # both batches come, under version 0
        lead.train()
        for version in (1, 2):
            lead.serve(version)
            lead.gate()
            lead.train()
        lead.serve(3)
        lead.gate(stop=True)
        lead.end()

    def trained_later(lead: Lead) -> set[int]:
        if lead.inbox.samples < 16:
            lead.receive()
        return {group.batch for group in lead.inbox.groups.values()}

    trained = play.run(recipe, script=script)
    check_whole(trained, recipe)
    assert trained.versions[1] == [[0] * len(tokens) for tokens in trained.versions[1]]


def test_without_a_window_what_is_complete_first_is_trained_first_within_the_bound(play: Play):
    recipe = recipe_for(window=None, max_staleness=2, group_size=2, steps=8)
    trained = play.run(recipe)
    check_whole(trained, recipe)
    assert oldest_age(trained) <= 2
    assert {position for batch in trained.positions for position in batch} <= set(range(4 * 8 + trained.dropped // 2))
    assert all(set(batch["batch"].tolist()) == {-1} for batch in trained.batches)
    assert trained.service.pacing.completed == (8 * 8 + trained.dropped) // 2


def test_a_credit_lets_replacements_start_at_once(play: Play):
    """No new weights and no step in between: alive are one batch of two groups, until one of them is dropped."""
    recipe = recipe_for(window=None, max_staleness=0, steps=1)

    def script(lead: Lead) -> None:
        lead.serve(0)
        lead.gate()
        for credit in range(4):
            while len(lead.inbox.groups) < 2:
                lead.receive()
            assert lead.trained.services[0].health()["groups_in_flight"] == 0
            lead.drop([lead.inbox.groups.pop(min(lead.inbox.groups, key=int))])
            assert lead.gates == credit + 2
        lead.train()
        lead.serve(1)
        lead.gate(stop=True)
        lead.end()

    trained = play.run(recipe, script=script)
    check_whole(trained, recipe)
    assert trained.positions == [[4, 5]] and trained.dropped == 16
    assert trained.service.health()["gate_step"] == 5


def test_gates_that_come_at_once_are_passed_in_their_order(play: Play):
    recipe = recipe_for(window=None, max_staleness=4, steps=2)

    def script(lead: Lead) -> None:
        lead.serve(0)
        for dropped in range(8):  # of groups that nobody has seen: rollout need not know
            lead.trained.dropped = 4 * dropped
            lead.gate()
        for version in (0, 1):
            lead.serve(version)
            lead.train()
        while len(lead.inbox.groups) < 7:
            lead.receive()
        lead.serve(2)
        lead.gate(stop=True)
        lead.end()

    trained = play.run(recipe, script=script)
    assert trained.service.health()["gate_step"] == 8 and trained.service.health()["groups_completed"] == 4 + 7


def test_held_out_prompts_are_answered_while_batches_are_generated(play: Play, tmp_path):
    scored = tmp_path / "scored"
    scored.touch()
    options = {"reward": f"{HERE}:held_out_waits_for_file", "file": str(scored), "evaluation": 1}
    recipe = recipe_for(window=2, steps=6, evaluate=True, eval_every=1, data_options=options)

    def before_gate(version: int) -> None:
        if version == 1:
            scored.unlink()  # from here on no evaluation ends
        if version == 4:  # batch 3 is trained, whose groups started at gate 2: nothing waits for v1's evaluation
            assert play.service.evaluating == 1
            scored.touch()

    trained = play.run(recipe, before_gate=before_gate)
    check_whole(trained, recipe)
    evaluated = [row["weight_version"] for row in trained.evaluations]
    assert evaluated[:2] == [0, 1] and evaluated[-1] == 6 and evaluated == sorted(set(evaluated))
    assert 2 not in evaluated  # v3 was due before that of v1 was done
    assert all(row["accuracy"] == 1.0 for row in trained.evaluations)


# Groups that are not kept ---------------------------------------------------------------------------------------------

VARIED = "meshy.rollout.filters:varied_rewards"


@pytest.mark.parametrize("pace", [{"window": 1}, {"window": 2}, {"window": None, "max_staleness": 2}])
def test_one_constant_group_is_replaced_and_the_run_ends(play: Play, pace):
    options = {"reward": f"{HERE}:same_for_one", "train": 4}
    recipe = recipe_for(
        group_filter=VARIED,
        steps=2,
        data_options=options,
        sampling=Sampling(temperature=100.0, max_new_tokens=12),
        **pace,
    )
    trained = play.run(recipe)
    check_whole(trained, recipe)
    assert "train-1" not in {name for batch in trained.batches for name in batch["prompt_id"]}
    assert trained.service.pacing.filtered[1.0] >= 1
    dropped = trained.service.metrics()["rollout/groups_filtered"]
    assert sum(batch["lost"].sum().item() for batch in trained.batches) == dropped >= 1


def test_a_constant_reward_ends_the_run_with_a_histogram(play: Play):
    recipe = recipe_for(group_filter=VARIED, max_filtered_groups=5, data_options={"reward": f"{HERE}:same"})
    with pytest.raises(NothingSurvives, match=r"6 groups in a row have been dropped.*\n +0\.5 #{6} 6$"):
        play.run(recipe)


@pytest.mark.parametrize("pace", [{"window": 1}, {"window": 2}, {"window": None, "max_staleness": 20}])
def test_ten_rows_and_twenty_steps(play: Play, pace):
    """Epochs go on, and each prompt is trained as often as any other."""
    recipe = recipe_for(steps=20, data_options={"train": 10}, **pace)
    trained = play.run(recipe)
    check_whole(trained, recipe)
    if pace["window"] is not None:
        assert trained.positions == [[2 * j, 2 * j + 1] for j in range(20)]
    prompts = Counter(name for batch in trained.batches for name in batch["prompt_id"])
    assert prompts == {f"train-{i}": 4 * 4 for i in range(10)}


def test_in_a_batch_of_eight_one_constant_group_and_a_reward_that_raises_once_are_replaced(play: Play, tmp_path):
    (tmp_path / "not yet").touch()
    config = RolloutConfig(group_size=2, evaluate=False, group_filter=VARIED)
    options = {"train": 16, "reward": f"{HERE}:raising_once_and_same_for_one", "file": str(tmp_path / "not yet")}
    recipe = recipe_of(config, batch_size=16, steps=2, data_options=options)
    trained = play.run(recipe)
    check_whole(trained, recipe)
    assert trained.service.pacing.failures == {"reward error": 1}
    assert trained.service.pacing.filtered.total() >= 1


@pytest.mark.parametrize("fields", [{"window": 1}, {"window": 2}, {"window": 1, "max_in_flight": 8}])
def test_over_sampling_fills_the_batch_and_gives_up_the_rest(play: Play, fields):
    """Eight groups are started for four."""
    recipe = recipe_for(over_sampling=2.0, steps=3, group_size=2, **fields, **TAILED)

    def script(lead: Lead) -> None:
        lead.run()
        lead.until(lambda: lead.trainer.engine.running() == 0)  # the requests of those given up were aborted

    trained = play.run(recipe, script=script)
    check_whole(trained, recipe)
    assert oldest_age(trained) <= fields["window"] - 1
    health = trained.service.health()
    assert health["groups_completed"] == 3 * 4 and trained.service.room.used_samples == 0
    given_up = health["groups_given_up"]
    assert 3 <= given_up <= 3 * 3 if "max_in_flight" in fields else given_up == 3 * 4


# What is in flight ----------------------------------------------------------------------------------------------------


def most_at_once(trained: Trained) -> int:
    """Groups in flight, by the times in their rows: begun before it was sent, ended after it was scored."""
    spans = {(b["t_sent"][i].item(), b["t_rewarded"][i].item()) for b in trained.batches for i in range(len(b["uid"]))}
    events = sorted([(sent, 1) for sent, _ in spans] + [(scored, -1) for _, scored in spans])
    now = most = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    ("fields", "groups"), [({"max_in_flight": 13}, 3), ({"max_in_flight_tokens": 300}, 2), ({"max_in_flight": 4}, 1)]
)
def test_no_more_is_in_flight_than_is_said(play: Play, fields, groups):
    recipe = recipe_for(
        window=4, steps=4, sampling=Sampling(temperature=100.0, max_new_tokens=24), context_length=64, **fields
    )
    trained = play.run(recipe)
    check_whole(trained, recipe)
    assert most_at_once(trained) == groups


def test_after_each_update_the_running_requests_return_to_the_target(play: Play):
    """Groups of one, each replaced as it ends; far more may be alive than run."""
    config = RolloutConfig(group_size=1, window=None, max_in_flight=8, evaluate=False)
    recipe = recipe_of(config, batch_size=4, steps=60, max_staleness=30, **TAILED)
    seen = []

    def script(lead: Lead) -> None:
        def at_target() -> bool:
            seen.append(lead.trainer.engine.running())
            return seen[-1] == 8

        lead.serve(0)
        for version in range(5):
            lead.gate()
            lead.until(at_target)
            lead.train()
            lead.serve(version + 1)
        lead.gate(stop=True)
        lead.end()

    trained = play.run(recipe, script=script)
    assert len(trained.batches) == 5 and max(seen) == 8 and trained.service.health()["groups_failed"] == {}


# New weights under load -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interrupted", ["continue", "restart"])
def test_new_weights_under_load(play: Play, interrupted):
    """All groups start at once, and each step's weights come while those that are longer are running."""
    config = RolloutConfig(group_size=1, window=None, interrupted=interrupted, evaluate=False)
    recipe = recipe_of(config, batch_size=4, steps=10, max_staleness=10, data_options={"train": 40}, **TAILED)
    trained = play.run(recipe)
    check_whole(trained, recipe)
    assert sorted(p for batch in trained.positions for p in batch) == list(range(40))  # none is lost
    assert trained.service.health()["groups_failed"] == {} and trained.dropped == 0
    written = [tokens for batch in trained.versions for tokens in batch]
    (numbers,) = trained.service.health()["inference"].values()
    if interrupted == "continue":
        assert max(len(set(tokens)) for tokens in written) >= 4  # a long one survives several updates
        assert all(a <= b for tokens in written for a, b in pairwise(tokens))
    else:
        assert all(len(set(tokens)) == 1 for tokens in written) and numbers["retries"] >= 1
    assert numbers["failures"] == numbers["stale"] == 0


def test_lock_step_is_exact(play: Play):
    recipe = recipe_for(window=1, steps=10, group_size=2)
    trained = play.run(recipe)
    check_whole(trained, recipe)
    assert [{v for tokens in batch for v in tokens} for batch in trained.versions] == [{j} for j in range(10)]
