"""Recipe files and command-line settings: what is read, what is refused and how it is said."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from meshy.recipe import ColocationRing, QueueConfig, Recipe, RecipeError, Sampling, to_json
from meshy.refusals import type_faults
from meshy.settings import apply_settings, load_recipe, parse_settings, parse_text, resolve
from meshy.topology import gpu_list
from tests.core.roles import Learner, recipe_of

HEAD = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\nfrom tests.core.roles import *\n"


def write(folder: Path, body: str) -> Path:
    file = folder / "some_recipe.py"
    file.write_text(HEAD + body)
    return file


def refused(file: Path, settings: list[str] | None = None) -> str:
    with pytest.raises(RecipeError) as error:
        load_recipe(file, parse_settings(settings or []), gpus=2)
    return str(error.value)


def test_every_kind_of_field_is_set_by_its_dotted_path() -> None:
    changed, faults = apply_settings(
        recipe_of(),
        {
            "steps": "7", "sampling.temperature": "0.5", "data_options.digits": "3", "data_options.name": "x",
            "trainer.lr": "1e-3", "trainer.compile": "True", "trainer.clip": "none", "trainer.also": "a,b",
            "inference.replicas": "4", "inference.args": '["--x", "1"]', "model": "123", "base_port": "12000",
        },
    )  # fmt: skip
    assert faults == []
    assert type_faults(changed) == []
    learner = changed.group("trainer").config
    assert isinstance(learner, Learner)
    assert (learner.lr, learner.compile, learner.clip, learner.also) == (1e-3, True, None, ("a", "b"))
    assert (changed.steps, changed.sampling.temperature, changed.model, changed.base_port) == (7, 0.5, "123", 12000)
    assert changed.data_options == {"digits": 3, "name": "x"}
    assert changed.group("inference").replicas == 4
    assert changed.group("inference").config.args == ("--x", "1")


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("trainer.batchsize", "64", "trainer.batchsize: no such field (did you mean 'trainer.batch_size'?)"),
        ("triner.batch_size", "64", "triner.batch_size: no such field or group (did you mean 'trainer.batch_size'?)"),
        ("step", "64", "step: no such field or group (did you mean 'steps'?)"),
        ("sampling.temprature", "1", "sampling.temprature: no such field (did you mean 'temperature'?)"),
        ("trainer.batch_size", "64.5", "trainer.batch_size: expected int, got '64.5'"),
        ("trainer.batch_size", "many", "trainer.batch_size: expected int, got 'many'"),
        ("trainer.compile", "1", "trainer.compile: expected bool, got '1'"),
        ("trainer.lr", "infe5", "trainer.lr: expected float, got 'infe5'"),
        ("trainer.clip", "wide", "trainer.clip: expected float | none, got 'wide'"),
        ("inference.engine", "vllm", "inference.engine: expected 'auto' | 'embedded', got 'vllm'"),
        ("trainer.lr.x", "1", "trainer.lr.x: 'lr' is a float and has no field 'x'"),
        ("trainer", "1", "trainer: 'trainer' is a group; set one of its fields"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused_with_its_path(path: str, text: str, said: str) -> None:
    _, faults = apply_settings(recipe_of(), {path: text})
    assert len(faults) == 1
    assert faults[0].startswith(said)


def test_all_faulty_settings_are_named_at_once() -> None:
    _, faults = apply_settings(recipe_of(), {"trainer.lr": "x", "nothing": "1", "steps": "2"})
    assert [fault.split(":")[0] for fault in faults] == ["trainer.lr", "nothing"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lr": "1e-6"}, "trainer.lr: expected float, got str '1e-6'"),
        ({"compile": 1}, "trainer.compile: expected bool, got int 1"),
        ({"batch_size": True}, "trainer.batch_size: expected int, got bool True"),
        ({"batch_size": 64.0}, "trainer.batch_size: expected int, got float 64.0"),
        ({"also": ["a"]}, "trainer.also: expected tuple[str, ...], got list ['a']"),
    ],
)
def test_a_wrong_type_in_the_recipe_itself_is_refused_with_its_path(change: dict, said: str) -> None:
    assert type_faults(recipe_of(learner=dataclasses.replace(Learner(), **change))) == [said]


@pytest.mark.parametrize(
    ("rings", "said"),
    [
        (ColocationRing(id="r", members=()), "rings: expected a tuple of ColocationRing, got ColocationRing"),
        (("r",), "rings[0]: expected ColocationRing, got 'r'"),
        ((ColocationRing(id=3, members=()),), "rings[0].id: expected str, got int 3"),  # type: ignore[arg-type]
        ((ColocationRing(id="r", members=(("trainer", "sometimes"),)),), "rings[0].members: expected tuple"),
        ((ColocationRing(id="r", members=(["trainer", "fallback"],)),), "rings[0].members: expected tuple"),
        ((ColocationRing(id="r", members=("trainer",)),), "rings[0].members: expected tuple"),
        ((ColocationRing(id="r", members=(("trainer",),)),), "rings[0].members: expected tuple"),
    ],
)
def test_rings_are_checked_too(rings, said: str) -> None:
    (fault,) = type_faults(recipe_of(rings=rings))
    assert fault.startswith(said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sampling": None}, "sampling: expected Sampling, got NoneType None"),
        ({"sampling": {"temperature": 1}}, "sampling: expected Sampling, got dict"),
        ({"sampling": QueueConfig()}, "sampling: expected Sampling, got QueueConfig"),
        ({"model": Sampling()}, "model: expected str, got Sampling"),
        ({"groups": None}, "groups: expected a tuple of ServiceGroup, got None"),
        ({"groups": []}, "groups: expected a tuple of ServiceGroup, got []"),
        ({"data_options": {"a": {"b": [float("nan")]}}}, "data_options.a.b[0]: expected a finite number, got nan"),
    ],
)
def test_a_record_of_another_kind_is_refused(change: dict, said: str) -> None:
    (fault,) = type_faults(dataclasses.replace(recipe_of(), **change))
    assert fault.startswith(said)


@pytest.mark.parametrize(("text", "value"), [(".5", 0.5), ("+.5e-1", 0.05), ("1.", 1.0), ("inf", math.inf)])
def test_numbers_may_be_written_as_python_does(text: str, value: float) -> None:
    changed, faults = apply_settings(recipe_of(), {"trainer.lr": text})
    assert faults == [] and changed.group("trainer").config.lr == value


def test_run_wide_fields_are_checked_too() -> None:
    faults = type_faults(recipe_of(steps="10", sampling=Sampling(top_k=1.5), deterministic="yes"))  # type: ignore[arg-type]
    assert faults == [
        "steps: expected int, got str '10'",
        "deterministic: expected bool, got str 'yes'",
        "sampling.top_k: expected int, got float 1.5",
    ]


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (["a.b=1", "--steps", "3", "--base-port=4"], {"a.b": "1", "steps": "3", "base_port": "4"}),
        (["x=a=b"], {"x": "a=b"}),
        (["x="], {"x": ""}),
    ],
)
def test_settings_are_read_from_arguments(arguments: list[str], settings: dict[str, str]) -> None:
    assert parse_settings(arguments) == settings


@pytest.mark.parametrize("arguments", [["steps"], ["--steps"], ["=3"], ["a=1", "a=2"]])
def test_arguments_that_are_no_settings_are_refused(arguments: list[str]) -> None:
    with pytest.raises(RecipeError):
        parse_settings(arguments)


def test_text_for_a_string_stays_text() -> None:
    assert parse_text("3", str) == "3"
    assert parse_text("none", str | None) is None
    assert parse_text("12", str | int) == "12"


def test_a_recipe_file_with_a_constant(tmp_path: Path) -> None:
    file = write(tmp_path, "RECIPE = recipe_of(name='')")
    loaded = load_recipe(file, {"steps": "3"}, gpus=2)
    assert isinstance(loaded, Recipe)
    assert (loaded.name, loaded.steps) == ("some_recipe", 3)


def test_options_of_a_recipe_function_become_settings(tmp_path: Path) -> None:
    body = "base = recipe_of\ndef recipe(gpus: int, wide: bool = False, model: str = 'm'):\n"
    body += "    return base(engines=gpus - 1, steps=2 if wide else 1, model=model)\n"
    loaded = load_recipe(write(tmp_path, body), {"wide": "true", "model": "other", "seed": "3"}, gpus=5)
    assert (loaded.group("inference").replicas, loaded.steps, loaded.model, loaded.seed) == (4, 2, "other", 3)


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "grpo_sync.py").touch()
    assert "did you mean 'grpo_sync.py'?" in refused(tmp_path / "grpo_snc.py")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("sys.exit(0)", "SystemExit: 0"),
        ("1/0", "line 3: ZeroDivisionError: division by zero"),
        ("def broken(:", "SyntaxError"),
        ("import no_such_thing", "no_such_thing"),
        ("x = 1", "exports neither RECIPE nor a function recipe"),
        ("recipe = None\nRECIPE = {}", "expected a meshy Recipe, got dict"),
        ("Learner(batchsize=3)", "'batchsize' (did you mean 'batch_size'?)"),
        ("def recipe(size: int):\n    return None", "size: this recipe needs a value; add size=<int>"),
        ("def recipe(size: int = 1):\n    raise KeyError('lost')", "KeyError: 'lost'"),
    ],
)
def test_a_recipe_that_cannot_be_loaded_says_why(tmp_path: Path, body: str, said: str) -> None:
    assert said in refused(write(tmp_path, body))


def test_the_options_of_a_recipe_are_typed(tmp_path: Path) -> None:
    file = write(tmp_path, "def recipe(size: int = 1):\n    return None")
    assert refused(file, ["size=large"]) == "size: expected int, got 'large'"


def test_the_resolved_recipe_is_plain_json() -> None:
    import json

    data = json.loads(json.dumps(to_json(recipe_of(data=recipe_of))))
    assert data["data"] == "tests.core.roles:recipe_of"
    assert data["groups"][1]["config"]["batch_size"] == 128


def test_faults_of_settings_and_of_the_topology_are_told_together(tmp_path: Path) -> None:
    file = write(tmp_path, "RECIPE = recipe_of(steps=0)")
    with pytest.raises(RecipeError) as error:
        resolve(file, {"trainer.l": "1", "inference.replicas": "9", "trainer.also": "nothing"}, gpu_list(1, 2))
    assert [fault.split(":")[0] for fault in error.value.faults] == [
        "trainer.l",
        "steps",
        "too few GPUs",
        "'trainer' consumes train.nothing, which nothing produces; it would wait for ever",
    ]
