"""Refusals before anything is spawned: pure ones of the configuration, and those that look at the data."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshy.data.task import Task
from meshy.recipe import RecipeError, ServiceGroup
from meshy.refusals import type_faults, value_faults
from meshy.rollout.config import RolloutConfig
from meshy.rollout.preflight import load_task
from meshy.settings import apply_settings
from meshy.topology import derive_topology, gpu_list
from tests.rollout.roles import HERE, MODEL, Learner, Watcher, counting, recipe_of


def preflight(recipe) -> list[str]:
    return recipe.group("rollout").config.preflight(recipe)


def test_the_contract_holds_with_a_trainer():
    recipe = recipe_of(replicas=2)
    assert value_faults(recipe) == []
    contract = derive_topology(recipe, gpu_list(1, 1, "cpu")).contract
    assert set(contract.partition("gen_gate").consumers) == {"rollout.0", "rollout.1", "gates"}
    assert contract.partition("gen_gate").end_consumer.columns[-2:] == ("ack.rollout.0", "ack.rollout.1")
    assert contract.capacity["train"] == 8


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"group_size": 0}, "group_size: expected at least 1, got 0"),
        ({"group_size": 3}, "batch of 8 samples does not divide into groups of 3; set the trainer's batch_size to 9"),
        ({"group_size": 16}, "does not divide into groups of 16; set the trainer's batch_size to 16"),
        ({"window": 0}, "window: expected at least 1 (lock step), or none, got 0"),
        ({"window": -1}, "window: expected at least 1 (lock step), or none, got -1"),
        ({"window": None}, "window: without one, the trainer's max_staleness must say how old tokens may become"),
        ({"window": 2, "group_size": 3}, "does not divide into groups of 3"),
        ({"over_sampling": 0.5}, "over_sampling: expected at least 1, got 0.5"),
        ({"max_filtered_groups": -1}, "max_filtered_groups: expected 0 or more"),
        ({"max_in_flight_tokens": 0}, "max_in_flight_tokens: expected at least 1"),
        ({"inference": "infrence"}, "no group 'infrence' generates (did you mean 'inference'?)"),
        ({"inference": "trainer"}, "no group 'trainer' generates"),
        ({"reward_workers": 0}, "reward_workers: expected at least 1"),
        ({"reward_deadline": 0.0}, "reward_deadline: expected more than 0"),
        ({"eval_every": -1}, "eval_every: expected"),
        ({"eval_prompts": 0}, "eval_prompts: expected at least 1"),
        ({"max_in_flight": 7}, "max_in_flight: expected at least group_size (8)"),
        ({"group_deadline": 0.0}, "group_deadline: expected more than 0"),
        ({"log_trajectories": 1.5}, "log_trajectories: expected a share"),
        (
            {"max_in_flight": 8, "greedy_baseline": True},
            "max_in_flight: expected at least group_size and the greedy response (9), or none, got 8",
        ),
        ({"candidates": -1}, "candidates: expected 0 (none) or more, got -1"),
        ({"routes": ("math", "math")}, "routes: expected names that differ, got 'math', 'math'"),
        ({"routes": ("",)}, "routes: expected names that differ, got ''"),
        ({"route_by": f"{HERE}:by_number"}, "route_by: there are no routes for it to name; set routes"),
    ],
)
def test_a_wrong_setting_is_refused_with_what_to_change(fields, what):
    faults = value_faults(recipe_of(RolloutConfig(**fields)))
    assert len(faults) == 1
    assert faults[0].startswith("rollout") and what in faults[0]


@pytest.mark.parametrize("window", ["auto", 1.5, True])
def test_a_window_that_is_no_number_of_batches_is_refused(window):
    (fault,) = type_faults(recipe_of(RolloutConfig(window=window)))
    assert fault == f"rollout.window: expected int | none, got {type(window).__name__} {window!r}"


@pytest.mark.parametrize("text", ["auto", "1.5"])
def test_such_a_window_on_the_command_line_is_refused(text):
    _, faults = apply_settings(recipe_of(), {"rollout.window": text})
    assert faults == [f"rollout.window: expected int | none, got {text!r}"]


def test_no_window_on_the_command_line():
    changed, faults = apply_settings(recipe_of(), {"rollout.window": "none", "trainer.max_staleness": "3"})
    assert faults == [] and changed.group("rollout").config.window is None
    assert changed.group("rollout").config.live_rows(changed)["train"] == (3 + 1) * 8


@pytest.mark.parametrize(
    ("fields", "bound", "what"),
    [
        ({"window": 3}, 1, "up to 2 versions old, but the trainer's max_staleness is 1; raise that, or lower"),
        ({"window": 2}, 0, "with 2 batches under way tokens become up to 1 versions old"),
        ({"window": 3}, 2, None),
        ({"window": 1}, 0, None),
        ({"window": None}, 0, None),
        ({"window": None, "over_sampling": 1.5}, 1, "over_sampling: there is no batch to make up without a window"),
    ],
)
def test_a_window_and_a_bound_on_staleness_must_agree(fields, bound, what):
    faults = value_faults(recipe_of(RolloutConfig(**fields), max_staleness=bound))
    assert len(faults) == (what is not None)
    if what is not None:
        assert faults[0].startswith("rollout") and what in faults[0]


@pytest.mark.parametrize(("window", "fine"), [(1, True), (2, False), (None, False)])
def test_only_lock_step_repeats_itself(window, fine):
    recipe = recipe_of(RolloutConfig(window=window), max_staleness=4, deterministic=True)
    assert [fault.startswith("rollout.window: beyond lock step") for fault in value_faults(recipe)] == [True] * (
        not fine
    )


def test_two_trainers_on_one_partition_must_say_how_they_share_it():
    recipe = recipe_of(also=(ServiceGroup(id="second", config=Learner()),))
    with pytest.raises(RecipeError) as error:
        derive_topology(recipe, gpu_list(1, 1, "cpu"))
    assert "partition 'train' has 2 end consumers (second, trainer); exactly one may clear its rows" in str(error.value)
    assert "gen_gate.gate_step has two producers, 'trainer' and 'second'" in str(error.value)


def test_a_role_of_somebodys_own_sees_every_gate_and_none_is_cleared_before():
    recipe = recipe_of(replicas=3, also=(ServiceGroup(id="watcher", config=Watcher(), replicas=2),))
    gates = derive_topology(recipe, gpu_list(1, 1, "cpu")).contract.partition("gen_gate")
    readers = {"rollout.0", "rollout.1", "rollout.2", "watcher.0", "watcher.1"}
    assert set(gates.consumers) == readers | {"gates"}
    assert {f"ack.{reader}" for reader in readers} <= set(gates.end_consumer.columns)


@pytest.mark.parametrize(
    ("rows", "fine"), [(0, False), (1, False), (7, False), (8, True), (9, True)]
)  # a batch takes 8 prompts
def test_datasets_round_the_size_of_a_batch(rows, fine):
    recipe = recipe_of(RolloutConfig(group_size=2), batch_size=16, data_options={"train": rows})
    faults = preflight(recipe)
    assert fine == (faults == [])
    if rows == 0:
        assert "has no training prompt" in faults[0]
    elif not fine:
        assert f"has {rows} training prompts, but a batch of 16 samples in groups of 2 takes 8" in faults[0]
        assert f"batch_size to at most {2 * rows}, or set allow_repeats=true" in faults[0]


def test_three_rows_and_a_batch_of_eight_prompts_repeat_only_when_the_recipe_says_so():
    options = {"batch_size": 8, "data_options": {"train": 3}}
    assert len(preflight(recipe_of(RolloutConfig(group_size=1), **options))) == 1
    assert preflight(recipe_of(RolloutConfig(group_size=1, allow_repeats=True), **options)) == []


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"data": "meshy.data.nothing:task"}, "there is no module 'meshy.data.nothing'"),
        ({"data": f"{HERE}:countng"}, "has no 'countng' (did you mean 'counting'?)"),
        ({"data": f"{HERE}:NOT_A_FUNCTION"}, "is a int; name a function that returns a Task"),
        ({"data": f"{HERE}:raising"}, "raising raised OSError: the disk with the data is gone"),
        ({"data": f"{HERE}:a_list"}, "returned a list; it must return a meshy Task"),
        ({"data_options": {"trian": 3}}, "unexpected keyword argument 'trian' (data_options given: trian)"),
        ({"data_options": {"shared": 2}}, "2 of 4 evaluation prompts of task 'counting' also stand in train"),
        ({"data_options": {"evaluation": 0}}, "has no evaluation prompt; give it some, or set evaluate=false"),
        ({"data": f"{HERE}:no_chat"}, "2 of 3 train prompts of task 'no chat' are no list of messages"),
        ({"data": f"{HERE}:no_chat"}, "the first is row 1: Example(id='bad', messages='a string'"),
        ({"data": f"{HERE}:long_prompt"}, "train prompt 'long' of task 'long' has 200 tokens and leaves no room"),
        (
            {"data": f"{HERE}:long_prompt", "data_options": {"split": "evaluation"}},
            "evaluation prompt 'long' of task 'long' has 200 tokens",
        ),
        ({"data_options": {"reward": f"{HERE}:nothing"}}, f"reward: '{HERE}:nothing'"),
        ({"data_options": {"reward": f"{HERE}:NOT_A_FUNCTION"}}, "name a function of one RewardSample"),
        ({"data_options": {"reward": "no.such.module:reward"}}, "there is no module 'no'"),
    ],
)
def test_bad_data_are_refused_with_what_to_change(fields, what):
    config = RolloutConfig(group_size=4)
    faults = preflight(recipe_of(config, batch_size=4, **fields))
    assert len(faults) == 1 and what in faults[0], faults


def test_a_module_that_raises_when_imported_is_shown_with_its_error(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("1 / 0\n")
    assert "raised ZeroDivisionError" in preflight(recipe_of(data=f"{file}:task"))[0]
    config = RolloutConfig(group_size=4, reward=f"{file}:reward")
    assert preflight(recipe_of(config))[0].startswith("reward: importing")


def test_a_reward_that_no_other_process_can_load_is_refused():
    faults = preflight(recipe_of(RolloutConfig(group_size=4, reward=lambda sample: 1.0)))
    assert len(faults) == 1 and "define it with `def` at the top level of a file" in faults[0]


@pytest.mark.parametrize(
    ("target", "what"),
    [
        (
            "meshy.rollout.filters:varied_reward",
            "meshy.rollout.filters has no 'varied_reward' (did you mean 'varied_rewards'?)",
        ),
        (f"{HERE}:NOT_A_FUNCTION", "is a int; name a function of the rewards of a group"),
        ("meshy.rollout.filters:varied_rewards", None),
    ],
)
def test_a_filter_that_cannot_be_loaded_is_refused(target, what):
    faults = preflight(recipe_of(RolloutConfig(group_size=4, group_filter=target)))
    assert len(faults) == (what is not None) and all(what in fault for fault in faults), faults


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"routes": ("math", "code")}, []),
        ({"routes": ("even", "odd"), "route_by": f"{HERE}:by_number"}, []),
        (
            {"routes": ("math",)},
            [
                "meshy.rollout.routes:domain gives 5 of 16 training prompts of task 'domains' a route that is "
                "not in routes (math); the first is 'train-1': 'code'; add it there"
            ],
        ),
        (
            {"routes": ("maths", "code")},
            [
                "gives 6 of 16 training prompts of task 'domains' a route that is not in routes (maths, code); the "
                "first is 'train-0': 'math' (did you mean 'maths'?)",
                "routes: none of 16 training prompts of task 'domains' has route 'maths'",
            ],
        ),
        ({"routes": ("math", "code"), "route_by": "meshy.rollout.routes:domian"}, ["(did you mean 'domain'?)"]),
        (
            {"routes": ("math", "code"), "route_by": f"{HERE}:NOT_A_FUNCTION"},
            ["is a int; name a function from an example to the name of its route, or None"],
        ),
        (
            {"routes": ("math", "code"), "route_by": f"{HERE}:raising_for_some"},
            ["raising_for_some raised for 5 of 16 training prompts of task 'domains'; the first is 'train-1': Value"],
        ),
        ({"routes": ("math", "code"), "route_by": f"{HERE}:unhashable"}, ["'train-0': ['math']", "'math'", "'code'"]),
    ],
)
def test_routes_that_do_not_fit_the_data_are_refused(fields, what):
    faults = preflight(recipe_of(RolloutConfig(group_size=4, **fields), data=f"{HERE}:domains"))
    assert len(faults) == len(what) and all(map(str.__contains__, faults, what)), faults


def test_data_that_name_no_domain_are_refused_where_routes_want_one():
    (fault,) = preflight(recipe_of(RolloutConfig(group_size=4, routes=("math",))))
    assert "none of 16 training prompts of task 'counting' has route 'math', says meshy.rollout.routes:domain" in fault


def test_routes_on_the_command_line_and_in_the_contract():
    changed, faults = apply_settings(recipe_of(), {"rollout.routes": "math,code", "rollout.candidates": "4"})
    assert faults == [] and type_faults(changed) == []
    columns = derive_topology(changed, gpu_list(1, 1, "cpu")).contract.partition("train").columns
    assert (columns["route.math"].type, columns["route.code"].type) == ("scalar bool", "scalar bool")
    assert columns["student_topk_ids"].type == "jagged2d int32" and "greedy_reward" not in columns
    assert columns["student_topk_logprobs"].type == "jagged2d float32"


def test_more_candidates_than_the_model_has_tokens_are_refused():
    there = json.loads(Path(MODEL, "config.json").read_text())["vocab_size"]
    assert preflight(recipe_of(RolloutConfig(group_size=4, candidates=there))) == []
    (fault,) = preflight(recipe_of(RolloutConfig(group_size=4, candidates=there + 1)))
    assert f"candidates: {there + 1} a token were asked for, but the vocabulary of" in fault
    assert f"has {there}" in fault


def test_every_fault_is_found_at_once():
    options = {"train": 1, "evaluation": 0, "reward": f"{HERE}:nothing"}
    assert len(preflight(recipe_of(data_options=options))) == 3


def test_a_callable_names_the_task_as_well_and_gets_the_seed():
    assert preflight(recipe_of(data=counting)) == []

    def named_by_seed(seed: int) -> Task:
        return Task(name=str(seed), train=(), evaluation=(), reward="")

    assert load_task(dataclasses.replace(recipe_of(), data=named_by_seed, seed=7)).name == "7"


def test_looking_at_the_data_imports_neither_torch_nor_transformers():
    code = (
        "import sys\n"
        "from tests.rollout.roles import recipe_of\n"
        "recipe = recipe_of(data='meshy.data.addition:addition', data_options={})\n"
        "assert recipe.group('rollout').config.preflight(recipe) == []\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
