"""The first recipe, whole: real queue, real engine, real trainer, a few steps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshy.observe.jsonl import read_jsonl
from meshy.observe.runfolder import RunFolder
from tests.launch import ROOT, Launched, launched

pytestmark = pytest.mark.e2e

RECIPE = "recipes/grpo_sync.py"
SMALL = ("trainer.batch_size=32", "rollout.eval_prompts=16")
STEPS = 3
METRICS = [
    *("step", "weight_version", "reward_mean", "reward_std", "response_length_mean", "staleness_max", "loss"),
    *("grad_norm", "entropy", "lr", "mismatch_kl", "ess", "clip_fraction", "staleness_mean", "staleness/0", "dropped"),
    *("lost", "samples", "tokens", "step_seconds", "tokens_per_second"),
    *("time/generate", "time/reward", "time/queue", "time/train", "time/publish", "time/wait"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """One finished run of three steps; a status is asked for while it goes."""
    with launched(tmp_path_factory.mktemp("grpo") / "run", f"steps={STEPS}", *SMALL, recipe=RECIPE, slots=2) as run:
        run.wait_for_line("step 1/3", deadline=120)
        done = subprocess.run(
            [sys.executable, "-m", "meshy.cli", "status", str(run.run_dir), "--json"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        run.status = json.loads(done.stdout)
        assert run.wait() == 0, run.output
        assert run.left_after(10) == []
        yield run


@pytest.fixture(scope="module")
def steps(run: Launched) -> list[dict[str, Any]]:
    return read_jsonl(RunFolder(run.run_dir).metrics)


def test_every_step_has_its_numbers(steps: list[dict[str, Any]]) -> None:
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["weight_version"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert not [name for name in METRICS if step.get(name) is None]
        assert step["samples"] == 32


def test_lock_step_is_exact(run: Launched, steps: list[dict[str, Any]]) -> None:
    """Trainer and engine agree on every log-prob, and every token was written by the version that is trained."""
    assert max(step["logprob_diff_mean"] for step in steps) <= 1e-5
    assert all(step["staleness_max"] == 0 for step in steps)
    lines = read_jsonl(RunFolder(run.run_dir).trajectories)
    assert len(lines) == 32 * STEPS
    assert {(line["step"], version) for line in lines for version in line["weight_versions"]} == {
        (1, 0),
        (2, 1),
        (3, 2),
    }


def test_no_prompt_twice_in_a_batch_and_texts_of_a_group_differ(run: Launched) -> None:
    lines = read_jsonl(RunFolder(run.run_dir).trajectories)
    for step in range(1, STEPS + 1):
        groups = {line["position"]: str(line["prompt"]) for line in lines if line["step"] == step}
        assert sorted(groups) == list(range(4 * step - 4, 4 * step))
        assert len(set(groups.values())) == 4
    texts = [{line["response"] for line in lines if line["position"] == position} for position in range(4 * STEPS)]
    assert sum(len(group) > 1 for group in texts) > len(texts) // 2  # an easy prompt may have one answer only


def test_the_run_folder_is_whole(run: Launched) -> None:
    folder = RunFolder(run.run_dir)
    summary = json.loads(folder.summary.read_text())
    assert summary["status"] == "finished"
    for name in ["steps", "reward_first", "reward_last", "eval_before", "eval_after", "wall_seconds", "idle_share"]:
        assert summary[name] is not None, name
    assert summary["eval_before"] <= 0.6
    assert [row["weight_version"] for row in read_jsonl(folder.evals)] == [0, STEPS]
    assert list(folder.tensorboard.rglob("events.out.tfevents.*"))
    assert folder.reward_curve.stat().st_size > 5000
    assert {file.name for file in folder.logs.iterdir()} == {
        "queue.log", "inference.0.log", "trainer.0.log", "rollout.0.log",
    }  # fmt: skip
    assert json.loads(folder.recipe.read_text())["steps"] == STEPS


def test_status_shows_services_and_the_queue(run: Launched) -> None:
    status: Any = run.status
    text = json.dumps(status)
    assert all(name in text for name in ("inference.0", "trainer.0", "rollout.0"))
    assert "gen_gate" in text


def test_the_weights_load_in_transformers_and_measure_the_same(run: Launched) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/evaluate.py", str(run.run_dir), "--limit", "16"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    after = json.loads(RunFolder(run.run_dir).summary.read_text())["eval_after"]
    assert measured == {"weight_version": STEPS, "accuracy": after, "count": 16}
    assert sorted(path.name for path in RunFolder(run.run_dir).weights.iterdir()) == ["v2", "v3"]


@pytest.mark.prove
def test_the_same_seed_gives_the_same_run_on_two_trainer_ranks(
    run: Launched, steps: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Deterministic mode: the first batch is equal to the byte; one rank and two differ by rounding alone."""
    arguments = (f"steps={STEPS}", *SMALL, "inference.replicas=1", "trainer.gpus_per_replica=2")
    with launched(tmp_path / "run", *arguments, recipe=RECIPE, slots=3) as two:
        assert two.wait() == 0, two.output
    others = read_jsonl(RunFolder(two.run_dir).metrics)

    def texts(run: Launched) -> dict[Any, str]:
        lines = read_jsonl(RunFolder(run.run_dir).trajectories)
        return {line["uid"]: line["response"] for line in lines if line["step"] == 1}

    assert texts(run) == texts(two)
    for one, other in zip(steps[:1], others[:1], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_killing_inference_in_the_middle_of_generation_changes_nothing_but_time(
    run: Launched, steps: list[dict[str, Any]], tmp_path: Path
) -> None:
    with launched(tmp_path / "run", f"steps={STEPS}", *SMALL, recipe=RECIPE, slots=2) as killed:
        killed.wait_for_line("step 1/3", deadline=120)
        killed.service("inference.0").kill()
        killed.wait_for_line("inference.0 is back after", deadline=60)
        assert killed.wait() == 0, killed.output
        assert killed.left_after(10) == []
    folder = RunFolder(killed.run_dir)
    others = read_jsonl(folder.metrics)
    assert [step["loss"] for step in others] == [step["loss"] for step in steps]
    assert [step["weight_version"] for step in others] == [1, 2, 3]
    assert {step["staleness_max"] for step in others} == {0}
    assert json.loads(folder.summary.read_text())["restarts"] == {"inference.0": 1}


@pytest.mark.prove
def test_a_role_from_outside_writes_a_column_that_the_trainer_waits_for(tmp_path: Path) -> None:
    arguments = ("steps=2", *SMALL, "trainer.also_consumes=length", "rollout.evaluate=false")
    with launched(tmp_path / "run", *arguments, recipe="tests/runs/lengths.py", slots=2) as run:
        assert run.wait() == 0, run.output
        assert run.left_after(10) == []
    trained = [step["samples"] for step in read_jsonl(RunFolder(run.run_dir).metrics)]
    scored = (run.run_dir / "lengths.txt").read_text().split()
    assert trained == [32, 32]
    assert len(scored) == len(set(scored)) == 64


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trainer.batch_size=100"], "does not divide into groups of 8"),
        (["data_options.train_size=0"], "has no training prompt"),
        (["trainer.also_consumes=length"], "consumes train.length, which nothing produces"),
        (["rollout.reward=no.such:thing"], "no.such"),
        (["inference.engine=vllm"], "inference.engine: expected"),
    ],
)
def test_bad_input_is_refused_before_anything_is_spawned(tmp_path: Path, arguments: list[str], said: str) -> None:
    with launched(tmp_path / "run", *arguments, recipe=RECIPE, slots=2) as run:
        assert run.wait() != 0
    assert said in run.output
    assert not (run.run_dir / "logs").exists() or not list((run.run_dir / "logs").iterdir())
