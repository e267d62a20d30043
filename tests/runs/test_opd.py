"""On-policy distillation: the same in both layouts, and whatever becomes of the teacher."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshy.observe.ask import ask_json
from meshy.observe.jsonl import read_jsonl
from scripts.opd_vs_grpo import SHARE, learn
from tests.launch import Launched, launched

pytestmark = pytest.mark.e2e

RECIPE = "recipes/opd.py"
SMALL = ("steps=3", "trainer.batch_size=48", "rollout.eval_prompts=32")


def run(folder: Path, slots: int, *settings: str, recipe: str = RECIPE, deadline: float = 170) -> Path:
    with launched(folder, *settings, recipe=recipe, slots=slots) as run:
        assert run.wait(deadline) == 0, run.output
    return folder


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def same(one: Path, other: Path) -> bool:
    """Losses step for step, and what was trained, to the bit."""
    steps, others = read_jsonl(one / "metrics.jsonl"), read_jsonl(other / "metrics.jsonl")
    names = ("step", "loss", "grad_norm", "distill_kl", "teacher_mass", "reward_mean", "tokens")
    return [[row[name] for name in names] for row in steps] == [[row[name] for name in names] for row in others]


@pytest.fixture(scope="module")
def colocated(tmp_path_factory) -> Path:
    """An undisturbed run on one slot."""
    return run(tmp_path_factory.mktemp("opd") / "colocated", 1, *SMALL, "colocated=true", "teacher.evaluate=16")


def test_one_slot_generates_scores_and_trains_in_turn(colocated: Path) -> None:
    holders = [turn["holder"] for turn in read_jsonl(colocated / "ring-gpus.jsonl")]
    assert [row["samples"] for row in read_jsonl(colocated / "metrics.jsonl")] == [48] * 3
    assert summary(colocated)["teacher_eval"] > 0.9
    # The teacher's scores make the trainer's work: nobody else has the GPU in between.
    after_teacher = [holders[i + 1] for i, holder in enumerate(holders[:-1]) if holder == "teacher"]
    assert after_teacher[1:] == ["trainer"] * 3, holders


def frozen_in_mid_batch(run: Launched) -> dict[str, Any]:
    """Stop the teacher when it has rows that it has not answered; what the queue says of it then."""
    run.wait_for_line("step", 120)
    queue = json.loads((run.run_dir / "topology.json").read_text())["queue"]
    teacher, end = run.service("teacher.0"), time.monotonic() + 120
    while time.monotonic() < end:
        rows = rows_of_teacher(queue)
        if rows["taken"] > rows["answered"] and rows["answered"] > 0:
            teacher.send_signal(signal.SIGSTOP)
            rows = rows_of_teacher(queue)
            if rows["taken"] > rows["answered"] > 0:
                return rows
            teacher.send_signal(signal.SIGCONT)
        time.sleep(0.002)  # another process's books
    raise AssertionError(f"the teacher was never seen with rows in its hands:\n{run.output}")


def rows_of_teacher(queue: dict[str, Any]) -> dict[str, int]:
    _, table = ask_json(queue["controller"]["host"], queue["admin_port"], "/table", deadline=5.0)
    train = table["train"]
    return {"taken": train["consumers"]["teacher"]["taken"], "answered": train["columns"]["ack.teacher"]}


@pytest.mark.prove
@pytest.mark.timeout(400)
def test_a_teacher_killed_in_mid_batch_changes_nothing(tmp_path: Path, colocated: Path) -> None:
    """On slots of its own, too: both layouts are the same run."""
    with launched(tmp_path / "run", *SMALL, "teacher.evaluate=0", recipe=RECIPE, slots=3) as run:
        rows = frozen_in_mid_batch(run)
        assert 0 < rows["answered"] < rows["taken"]
        run.service("teacher.0").send_signal(signal.SIGKILL)
        run.wait_for_line("teacher.0 is back", 90)
        assert run.wait(170) == 0, run.output
    assert summary(run.run_dir)["restarts"] == {"teacher.0": 1}
    assert same(run.run_dir, colocated)


@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_student_is_soon_as_good_as_its_teacher(tmp_path: Path, seed: int) -> None:
    distilled, grpo = learn("opd", seed, tmp_path / "opd"), learn("grpo_sync", seed, tmp_path / "grpo", "steps=40")
    assert distilled.teacher is not None
    bar = SHARE * distilled.teacher
    samples, others = distilled.samples_to(bar), grpo.samples_to(bar)
    print(f"seed {seed}: {samples} samples to {bar:.3f}, GRPO {others}")
    assert distilled.curve[-1][1] >= bar
    assert samples is not None and (others is None or samples < others)
    settings = (f"seed={seed}", "colocated=true", "rollout.eval_every=2")
    together = run(tmp_path / "together", 1, *settings, deadline=400)
    assert same(tmp_path / "opd", together)


@pytest.mark.prove
@pytest.mark.timeout(600)
def test_two_teachers_of_one_kind_share_the_rows(tmp_path: Path, colocated: Path) -> None:
    folder = run(tmp_path / "run", 4, *SMALL, "gpus=3", "teacher.replicas=2", "teacher.evaluate=0")
    assert same(folder, colocated)




@pytest.mark.prove
@pytest.mark.timeout(600)
def test_a_teacher_over_two_ranks_says_the_same(tmp_path: Path, colocated: Path) -> None:
    settings = (*SMALL, "gpus=3", "teacher.gpus_per_replica=2", "teacher.evaluate=0")
    assert same(run(tmp_path / "run", 4, *settings), colocated)


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "form",
    [
        ("teacher.scores=sampled", "trainer.also_consumes=teacher_logprobs",
         "trainer.token_advantage=meshy.algorithms.advantages.opd:opd_advantage",
         "trainer.loss=meshy.algorithms.losses.ppo_clip:ppo_clip_loss"),
        ("teacher.scores=topk", "trainer.also_consumes=teacher_topk_ids,teacher_topk_logprobs",
         "trainer.loss=meshy.algorithms.losses.teacher_topk:teacher_topk_loss"),
        ("teacher.scores=vocabulary", "trainer.also_consumes=teacher_vocab_logprobs",
         "trainer.loss=meshy.algorithms.losses.full_vocabulary:full_vocabulary_loss",
         "trainer.loss_options.divergence=jsd", "trainer.lr=1e-3"),
    ],
    ids=["sampled", "topk", "vocabulary"],
)  # fmt: skip
def test_every_form_of_distillation_teaches(tmp_path: Path, form: tuple[str, ...]) -> None:
    settings = ("steps=8", "rollout.candidates=0", "teacher.evaluate=0", *form)
    told = summary(run(tmp_path / "run", 3, *settings, deadline=280))
    assert told["eval_before"] < 0.5 and told["eval_after"] > 0.8, told


@pytest.mark.prove
@pytest.mark.timeout(600)
def test_two_teachers_and_none_by_domain(tmp_path: Path) -> None:
    """Rows of no route are trained by GRPO alone, and wait for nobody."""
    folder = run(tmp_path / "run", 4, recipe="tests/scoring/mixture.py")
    routes = {row.get("route") for row in read_jsonl(folder / "trajectories.jsonl")}
    assert routes == {"short", "long", None}
    shares = [row["teachers/distill_scored"] for row in read_jsonl(folder / "metrics.jsonl")]
    assert all(0.3 < share < 1.0 for share in shares), shares
