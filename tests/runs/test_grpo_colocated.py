"""Generation and training in turn on the same slots: the same run as on slots of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import launched

pytestmark = pytest.mark.e2e

COLOCATED, APART = "recipes/grpo_colocated.py", "recipes/grpo_sync.py"


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def performed(run_dir: Path, recipe: str, slots: int, *settings: str) -> Path:
    with launched(run_dir, *settings, recipe=recipe, slots=slots) as run:
        assert run.wait(170) == 0, run.output
    return run_dir


def texts(run_dir: Path) -> list[tuple[Any, ...]]:
    return sorted((row["position"], row["response"]) for row in lines(run_dir / "trajectories.jsonl"))


@pytest.mark.prove
def test_one_slot_generates_and_trains(tmp_path: Path) -> None:
    run = performed(tmp_path / "run", COLOCATED, 1, "steps=2", "trainer.batch_size=32", "trainer.verify_every=1")
    turns = lines(run / "ring-gpus.jsonl")
    assert [turn["turn"] for turn in turns] == list(range(1, len(turns) + 1))
    holders = [turn["holder"] for turn in turns]
    assert holders[-1] == "inference" and holders.count("trainer") >= 3  # its first load, and each step
    assert [row["step"] for row in lines(run / "metrics.jsonl")] == [1, 2]


@pytest.mark.prove
@pytest.mark.timeout(400)
@pytest.mark.parametrize("publish", ["disk", "shm"])
def test_the_same_as_apart_to_the_last_bit(tmp_path: Path, publish: str) -> None:
    settings = ("steps=20", f"trainer.publish={publish}", "trainer.verify_every=5")
    together = performed(tmp_path / "together", COLOCATED, 1, *settings)
    apart = performed(tmp_path / "apart", APART, 2, *settings)
    assert texts(together) == texts(apart)
    for mine, other in zip(lines(together / "metrics.jsonl"), lines(apart / "metrics.jsonl"), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-6)


@pytest.mark.prove
@pytest.mark.timeout(400)
def test_two_slots_learn_too(tmp_path: Path) -> None:
    """Two engines with a trainer over both."""
    run = performed(tmp_path / "run", COLOCATED, 2, "steps=20")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval_after"] > 0.9
