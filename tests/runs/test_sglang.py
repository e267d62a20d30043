"""The first recipe with real SGLang behind the same protocol."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from meshy.observe.jsonl import read_jsonl
from meshy.observe.runfolder import RunFolder
from tests.launch import Launched, launched

RECIPE = "recipes/grpo_sync.py"
ENGINE = "inference.engine=sglang"


def scheduler_of(run: Launched) -> psutil.Process:
    """The process in which SGLang computes. It writes its title over its environment, so it is found by descent."""
    descendants = psutil.Process(run.process.pid).children(recursive=True)
    return next(process for process in descendants if "sglang::scheduler" in " ".join(process.cmdline()))


@pytest.mark.sglang
@pytest.mark.timeout(600)
def test_a_run_outlives_its_only_sglang_server(tmp_path: Path) -> None:
    """Killed in the middle of generation: the server is started again on the current weights, and nothing is lost."""
    small = ("steps=4", "trainer.batch_size=32", "rollout.eval_prompts=16", "trainer.verify_every=1")
    with launched(tmp_path / "run", ENGINE, *small, recipe=RECIPE, slots=2) as run:
        run.wait_for_line("step 2/4", deadline=240)
        scheduler_of(run).kill()
        run.wait_for_line("inference.0 is back after", deadline=240)
        assert run.wait(120) == 0, run.output
        assert run.left_after(10) == []
    folder = RunFolder(run.run_dir)
    steps = read_jsonl(folder.metrics)
    summary = json.loads(folder.summary.read_text())
    assert [step["weight_version"] for step in steps] == [1, 2, 3, 4]
    assert {step["samples"] for step in steps} == {32}
    assert {step["staleness_max"] for step in steps} == {0}
    assert max(step["mismatch_kl"] for step in steps) <= 1e-4
    assert summary["restarts"] == {"inference.0": 1}


@pytest.mark.prove
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns_the_same_with_either_engine(tmp_path: Path, seed: int) -> None:
    accuracy = {}
    for engine in ("embedded", "sglang"):
        with launched(tmp_path / engine, f"inference.engine={engine}", f"seed={seed}", recipe=RECIPE, slots=2) as run:
            assert run.wait(600) == 0, run.output
            assert run.left_after(10) == []
        folder = RunFolder(run.run_dir)
        summary = json.loads(folder.summary.read_text())
        accuracy[engine] = summary["eval_after"]
        mismatch = max(step["mismatch_kl"] for step in read_jsonl(folder.metrics))
        print(json.dumps({"seed": seed, "engine": engine, "mismatch_kl_max": mismatch, **summary}))
        assert mismatch <= 1e-4
    assert min(accuracy.values()) >= 0.9
    assert abs(accuracy["embedded"] - accuracy["sglang"]) <= 0.05
