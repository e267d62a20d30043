import json
import subprocess
import sys

import pytest

from meshy.observe.advice import advice, outcome
from meshy.observe.curve import Curve, smoothed, text_chart, write_png
from meshy.observe.jsonl import JsonlWriter, read_jsonl
from meshy.observe.runfolder import RunFolder, read_json
from meshy.observe.summary import Failure, build_summary, eval_edges, print_end, reward_edges
from meshy.observe.timeline import Timeline

FIELDS = ("status", "steps", "reward_first", "reward_last", "eval_before", "eval_after", "wall_seconds", "idle_share")


def make_run(path, steps=20, rise=0.4, reward_std=0.3, scale=1.0, evals=True):
    """A run folder as services leave it: steps of 2 s, in each of which the engines are busy for 1.8 s."""
    folder = RunFolder.create("x", run_dir=path)
    timeline = Timeline(folder.timeline_of("inference.0"))
    with JsonlWriter(folder.metrics) as metrics, JsonlWriter(folder.evals) as evaluations:
        if evals:
            evaluations.write({"weight_version": 0, "accuracy": 0.5, "count": 8, "seconds": 1})
        for step in range(1, steps + 1):
            started = 1000 + 2 * step
            reward = scale * (0.5 + rise * step / steps)
            row = {"step": step, "reward_mean": reward, "reward_std": reward_std, "loss": 0.1, "grad_norm": 0.5}
            metrics.write(
                {**row, "step_seconds": 2, "started": started, "ended": started + 2, "tokens_per_second": 100}
            )
            timeline.record("decode", started, started + 1)
            timeline.record("train", started + 1, started + (2 if step in (1, steps) else 1.8))
        if evals:
            evaluations.write({"weight_version": steps, "accuracy": 0.5 + rise, "count": 8, "seconds": 1})
    timeline.close()
    folder.weights_of(steps).mkdir()
    folder.weights_of(9).mkdir(exist_ok=True)
    return folder


def test_the_summary_of_a_run_that_learned(tmp_path):
    folder = make_run(tmp_path / "run")
    summary = build_summary(folder, status="finished", started=1000, ended=1050)
    assert read_json(folder.summary) == summary and set(FIELDS) <= set(summary)
    assert (summary["status"], summary["steps"], summary["wall_seconds"]) == ("finished", 20, 50)
    assert summary["reward_first"] == pytest.approx(0.56) and summary["reward_last"] == pytest.approx(0.86)
    assert (summary["eval_before"], summary["eval_after"]) == (0.5, 0.9)
    assert summary["idle_share"] == pytest.approx(0.1)
    assert summary["weights"] == str(folder.path / "weights" / "v20")
    assert outcome(summary) == "learned"


def test_a_run_that_never_made_a_step(tmp_path):
    folder = RunFolder.create("x", run_dir=tmp_path / "run")
    failure = Failure(service="inference.0", reason="exit code 1", log=str(folder.log("inference.0")))
    summary = build_summary(folder, status="failed", started=0, ended=3, failure=failure)
    for field in ("reward_first", "reward_last", "eval_before", "eval_after", "idle_share", "weights"):
        assert summary[field] is None
    assert summary["steps"] == 0 and summary["failure"]["service"] == "inference.0"
    print_end(folder, summary)
    assert not folder.reward_curve.exists()
    first = advice(summary, [], folder.path)[0]
    assert first == f"inference.0 failed: exit code 1; its log: {folder.log('inference.0')}"


def test_edges():
    rows = [{"reward_mean": reward} for reward in (1, None, 3, 5)]
    assert reward_edges(rows) == (1, 5) and reward_edges(rows[:1]) == (1, 1) and reward_edges([]) == (None, None)
    evals = [{"weight_version": 0, "accuracy": 0.1}, {"weight_version": 10, "accuracy": 0.3}]
    assert eval_edges(evals) == (0.1, 0.3) and eval_edges(evals[:1]) == (0.1, None) and eval_edges([]) == (None, None)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"rise": 0.0}, "raise trainer.lr or steps"),
        ({"rise": -0.4}, "the policy got worse than it was: lower trainer.lr"),
        ({"rise": 0.0, "reward_std": 0.0}, "every sample got the same reward"),
        ({"rise": 0.4}, "AutoModelForCausalLM.from_pretrained("),
        ({"rise": 0.4, "evals": False}, "AutoModelForCausalLM.from_pretrained("),
    ],
)
def test_advice_fits_the_outcome(tmp_path, run, said):
    folder = make_run(tmp_path / "run", **run)
    summary = build_summary(folder, status="finished", started=0, ended=1)
    assert advice(summary, read_jsonl(folder.metrics), folder.path)[0].startswith(said)


def test_the_end_on_a_pipe(tmp_path, capfd):
    folder = make_run(tmp_path / "run")
    print_end(folder, build_summary(folder, status="finished", started=1000, ended=1050))
    text = capfd.readouterr().out
    assert "\x1b" not in text and "held-out accuracy   50.0 % -> 90.0 %" in text and "what to try next" in text
    assert "no engine busy      10.0 % of the time" in text and str(folder.reward_curve) in text
    assert folder.reward_curve.read_bytes().startswith(b"\x89PNG")


def test_the_chart_goes_up_from_left_to_right():
    steps = [{"step": step, "reward_mean": step / 10} for step in range(11)]
    plain = [line.plain for line in text_chart(Curve.of(steps, []), width=48, height=8, unicode=False)]
    ends = [line.rfind("*") for line in plain[:8] if "*" in line]
    assert len(ends) >= 6 and ends == sorted(ends, reverse=True) and ends[0] == 47
    assert plain[0].startswith("  1.05 |") and plain[7].startswith(" -0.05 |") and plain[9].endswith("step 10")
    braille = text_chart(Curve.of(steps, [{"weight_version": 10, "accuracy": 1.0}]), width=48, height=8)
    assert any("◆" in line.plain[-3:] for line in braille[:2])
    assert {len(line.plain) for line in braille[:8]} == {48}


@pytest.mark.parametrize("rewards", [[], [0.5], [0.5, 0.5], [0.0, 0.0], [None, -3.0], [1e-9, 2e-9], [1e6, -1e6]])
def test_odd_curves_are_drawn(tmp_path, rewards):
    steps = [{"step": step, "reward_mean": reward} for step, reward in enumerate(rewards, 1)]
    curve = Curve.of(steps, [{"weight_version": 0, "accuracy": 0.5}])
    assert bool(text_chart(curve)) == (bool(rewards) or curve.one_scale)
    write_png(curve, tmp_path / "c.png", "odd")


def test_smoothing_keeps_length_and_mean():
    assert smoothed([]) == [] and smoothed([2.0]) == [2.0]
    assert smoothed([0.0, 1.0] * 50) == pytest.approx([0.5] * 100, abs=0.2)


def test_the_summary_needs_neither_torch_nor_matplotlib(tmp_path):
    folder = make_run(tmp_path / "run")
    code = (
        "import sys; from meshy.observe.summary import build_summary; from meshy.observe.runfolder import RunFolder\n"
        "build_summary(RunFolder(sys.argv[1]), status='finished', started=0, ended=1)\n"
        "print(sorted({'torch', 'matplotlib', 'httpx', 'transfer_queue', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder.path)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n" and json.loads(folder.summary.read_text())["steps"] == 20
