"""docs/adding_a_role.md, carried out to the letter."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshy.observe.jsonl import read_jsonl
from meshy.observe.runfolder import RunFolder
from tests.docs.document import Document, Person, pattern
from tests.launch import ROOT

DOCUMENT = Document((ROOT / "docs/adding_a_role.md").read_text())
CHECKS = ("The recipe", "Several replicas, and some rows only")
RUNS = ("The run", "On GPUs")


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    person = Person(DOCUMENT, tmp_path)
    yield person
    person.end()


def trained(folder: RunFolder) -> list[tuple[list[dict[str, Any]], float]]:
    """Of each step: its samples as rollout wrote them down, and the mean of the rewards that were trained on."""
    samples = read_jsonl(folder.trajectories)
    steps = read_jsonl(folder.metrics)
    return [([s for s in samples if s["step"] == step["step"]], step["reward_mean"]) for step in steps]


def ask(folder: RunFolder, service: str, path: str) -> str:
    services = json.loads(folder.topology.read_text())["services"]
    entry = next(entry for entry in services if entry["name"] == service)
    with urllib.request.urlopen(f"http://{entry['host']}:{entry['admin_port']}{path}", timeout=10) as answer:
        return answer.read().decode()


def test_every_step_is_carried_out_by_a_test_below() -> None:
    assert set(DOCUMENT.sections) == {*CHECKS, *RUNS}


def test_a_role_and_its_recipe_are_fifty_lines() -> None:
    lines = [line for name in ("brevity.py", "short_grpo.py") for line in DOCUMENT.files[name].splitlines()]
    assert 10 < len([line for line in lines if line.strip()]) <= 50


def test_what_is_shown_is_compared() -> None:
    shown = pattern("a ...\nb  c...e\n...\nf\n")
    assert shown.fullmatch("a\nb c e\nf\n") and shown.fullmatch("a x\ny\nb cde\nz\nf\n")
    assert not shown.fullmatch("a x\nb cd\nf\n")
    assert not shown.fullmatch("a xb c e\nf\n")


@pytest.mark.parametrize("section", CHECKS)
def test_what_a_check_says(person: Person, section: str) -> None:
    for step in DOCUMENT.sections[section]:
        person.do(step)


@pytest.mark.e2e
def test_a_run_with_the_role_in_which_it_is_killed(person: Person, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs/short")
    for step in DOCUMENT.sections["The run"]:
        if step.command is not None and step.command.startswith("kill -STOP"):
            scored = json.loads(ask(folder, "brevity.0", "/health"))["scored"]
            assert scored >= 128
            name, number = ask(folder, "brevity.0", "/metrics").split()
            assert name == 'meshy_brevity_scored{service="brevity.0"}' and float(number) >= scored
        person.do(step)
    assert person.run is not None and person.run.wait() == 0, person.run.output
    assert json.loads(folder.summary.read_text())["restarts"] == {"brevity.0": 1}
    steps = trained(folder)
    assert [len(samples) for samples, _ in steps] == [128] * 3
    for samples, mean in steps:
        rewards = [s["reward"] + 0.1 * min(1.0, 8 / max(1, len(s["response"]))) for s in samples]
        assert mean == pytest.approx(sum(rewards) / 128, abs=1e-6)


@pytest.mark.e2e
@pytest.mark.prove
def test_a_run_with_a_role_in_the_ring(person: Person, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs/topic")
    for step in DOCUMENT.sections["On GPUs"]:
        person.do(step)
    assert person.run is not None and person.run.wait() == 0, person.run.output
    turns = [json.loads(line)["holder"] for line in (folder.path / "ring-gpus.jsonl").read_text().splitlines()]
    assert turns.count("topic") >= 3  # its load, and a batch each step
    assert {"inference", "trainer"} <= set(turns)
    steps = trained(folder)
    assert [len(samples) for samples, _ in steps] == [32] * 2
    for samples, mean in steps:
        assert 0.0 < abs(mean - sum(s["reward"] for s in samples) / 32) <= 0.1 + 1e-6
