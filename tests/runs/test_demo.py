"""The demo keeps what it promises: seeds, memory, start-up, idleness. Long: `make prove`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshy.observe.jsonl import read_jsonl
from meshy.observe.runfolder import RunFolder
from tests.launch import ROOT, launched

pytestmark = pytest.mark.prove

RECIPE = "recipes/grpo_sync.py"
GIB = 1 << 30


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns(tmp_path: Path, seed: int) -> None:
    began = time.time()
    with launched(tmp_path / "run", f"seed={seed}", recipe=RECIPE, slots=2) as run:
        run.wait_for_line("step 10/", deadline=120)
        pss = sum(process.memory_full_info().pss for process in run.processes())
        assert run.wait(400) == 0, run.output
        assert run.left_after(10) == []
    folder = RunFolder(run.run_dir)
    steps = read_jsonl(folder.metrics)
    summary = json.loads(folder.summary.read_text())
    done = subprocess.run(
        [sys.executable, "scripts/evaluate.py", str(run.run_dir)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    again = json.loads(done.stdout.splitlines()[-1])
    figures = {
        "seed": seed,
        "eval_before": summary["eval_before"],
        "eval_after": summary["eval_after"],
        "eval_after_by_transformers": again["accuracy"],
        "first_gate_seconds": round(steps[0]["started"] - began, 1),
        "pss_gib": round(pss / GIB, 2),
        "idle_share": round(summary["idle_share"], 3),
        "logprob_diff_max": max(step["logprob_diff_mean"] for step in steps),
        "wall_seconds": round(summary["wall_seconds"], 1),
    }
    print(json.dumps(figures))
    assert summary["eval_before"] <= 0.6
    assert summary["eval_after"] >= 0.9
    assert again["accuracy"] >= 0.9
    assert all(step["staleness_max"] == 0 for step in steps)
    assert figures["logprob_diff_max"] <= 1e-5
    assert pss < 4 * GIB
    assert summary["idle_share"] <= 0.15
    assert figures["first_gate_seconds"] < 30


@pytest.mark.parametrize("victim", ["trainer.0", "rollout.0", "queue"])
def test_killing_a_service_that_cannot_begin_anew_ends_the_demo_by_name(tmp_path: Path, victim: str) -> None:
    with launched(tmp_path / "run", recipe=RECIPE, slots=2) as run:
        run.wait_for_line("step 2/", deadline=120)
        if victim == "queue":
            next(p for p in run.processes() if "meshy.queue.server" in p.cmdline()).kill()
        else:
            run.service(victim).kill()
        assert run.left_after(10) == []
        assert run.wait(10) != 0
    assert f"{victim} on 127.0.0.1 was killed by SIGKILL" in run.output
    assert json.loads(RunFolder(run.run_dir).summary.read_text())["failure"]["service"] == victim


def test_equal_seeds_give_equal_runs(tmp_path: Path) -> None:
    """Deterministic mode: texts and losses repeat bit for bit."""
    told = []
    for name in ("a", "b"):
        arguments = ("steps=6", "rollout.eval_prompts=32")
        with launched(tmp_path / name, *arguments, recipe=RECIPE, slots=2) as run:
            assert run.wait(200) == 0, run.output
        folder = RunFolder(run.run_dir)
        texts = sorted((line["uid"], line["response"]) for line in read_jsonl(folder.trajectories))
        told.append((texts, [(step["loss"], step["grad_norm"]) for step in read_jsonl(folder.metrics)]))
    assert told[0] == told[1]
