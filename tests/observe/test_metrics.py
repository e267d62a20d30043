import json
import subprocess
import sys

import pytest

from meshy.observe.jsonl import read_jsonl
from meshy.observe.metrics import MetricsWriter
from meshy.observe.runfolder import RunFolder


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create("x", run_dir=tmp_path / "run")


def test_lines_and_tensorboard_events(folder, caplog):
    with MetricsWriter(folder) as metrics:
        for step in (1, 2):
            metrics.step(
                {"step": step, "reward_mean": step / 2, "loss": float("nan"), "time/train": 1.5, "note": "text"}
            )
        metrics.evaluation({"weight_version": 2, "accuracy": 0.75, "count": 8, "seconds": 0.5})
    rows = [json.loads(line, parse_constant=pytest.fail) for line in folder.metrics.read_text().splitlines()]
    assert [row["reward_mean"] for row in rows] == [0.5, 1.0] and rows[0]["loss"] is None
    assert caplog.text.count("loss is not a finite number") == 1
    (evaluation,) = read_jsonl(folder.evals)
    assert evaluation["accuracy"] == 0.75 and evaluation["time"] > 1e9

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    curves = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert curves["train/reward_mean"] == [(1, 0.5), (2, 1.0)]
    assert curves["time/train"] == [(1, 1.5), (2, 1.5)]
    assert curves["eval/accuracy"] == [(2, 0.75)]
    assert "train/loss" not in curves and "train/step" not in curves


def test_tensors_become_numbers(folder):
    torch = pytest.importorskip("torch")
    with MetricsWriter(folder) as metrics:
        metrics.step({"step": 1, "loss": torch.tensor(0.5), "lengths": torch.tensor([1, 2])})
    assert read_jsonl(folder.metrics) == [{"step": 1, "loss": 0.5, "lengths": [1, 2]}]


def test_torch_is_imported_only_when_writing():
    code = (
        "import sys, meshy.observe.metrics, meshy.observe.logs; assert not {'torch', 'tensorboard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
