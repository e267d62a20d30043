"""On-policy distillation beside GRPO from the same start: samples until the student does nearly as well as its teacher.

    python scripts/opd_vs_grpo.py [--seeds 0 1 2] [--picture docs/opd.png] [--keep runs/opd_vs_grpo]

For each seed recipes/opd.py (three slots) and recipes/grpo_sync.py (two), with a look at the held-out prompts every
other batch. Bar: the student reaches 0.95 of its teacher's accuracy, in fewer samples than GRPO does. Runs one after
another, about two minutes a seed on two cores; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from meshy.observe.jsonl import read_jsonl

ROOT = Path(__file__).parents[1]
SHARE = 0.95  # of the teacher's accuracy
BATCH = 128
SLOTS = {"opd": 3, "grpo_sync": 2}


@dataclass(frozen=True)
class Learnt:
    """samples, accuracy: one after another. teacher: its accuracy; None where there is none."""

    name: str
    seed: int
    curve: tuple[tuple[int, float], ...]
    teacher: float | None

    def samples_to(self, accuracy: float) -> int | None:
        return next((samples for samples, value in self.curve if value >= accuracy), None)


def learn(name: str, seed: int, folder: Path, *settings: str) -> Learnt:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(SLOTS[name])]
    command += ["-m", "meshy.ignitor", str(ROOT / "recipes" / f"{name}.py"), f"seed={seed}", "rollout.eval_every=2"]
    command += [*settings, "--run-dir", str(folder)]
    with (folder.parent / f"{folder.name}.txt").open("w") as output:
        subprocess.run(
            command, check=True, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    return read(name, seed, folder)


def read(name: str, seed: int, folder: Path) -> Learnt:
    """From what a run left."""
    accuracy = {row["weight_version"]: row["accuracy"] for row in read_jsonl(folder / "evals.jsonl")}
    summary = json.loads((folder / "summary.json").read_text())
    curve = tuple((version * BATCH, accuracy[version]) for version in sorted(accuracy))
    return Learnt(name, seed, curve, summary.get("teacher_eval"))


def draw(runs: list[Learnt], file: Path) -> None:
    """All curves in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for run in runs:
        colour, label = ("tab:orange", "distillation") if run.name == "opd" else ("tab:blue", "GRPO")
        axes.plot(
            *zip(*run.curve, strict=True), color=colour, alpha=0.8, label=label if run.seed == runs[0].seed else None
        )
    teacher = next(run.teacher for run in runs if run.teacher is not None)
    axes.axhline(SHARE * teacher, color="grey", linestyle="--", linewidth=1, label=f"{SHARE} of the teacher's")
    axes.set(xlabel="samples", ylabel="held-out accuracy")
    axes.legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--keep", type=Path, help="a folder for the runs; else they are gone afterwards")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        runs = [
            learn(name, seed, folder / f"{name}.{seed}", *(("steps=40",) if name == "grpo_sync" else ()))
            for seed in options.seeds
            for name in SLOTS
        ]
    result = {}
    for seed in options.seeds:
        opd, grpo = (next(run for run in runs if run.seed == seed and run.name == name) for name in SLOTS)
        assert opd.teacher is not None
        bar = SHARE * opd.teacher
        samples = {"opd": opd.samples_to(bar), "grpo": grpo.samples_to(bar)}
        result[seed] = {"teacher": opd.teacher, "student": opd.curve[-1][1], **samples}
        print(
            f"seed {seed}: teacher {opd.teacher:.3f}, student {opd.curve[0][1]:.3f} -> {opd.curve[-1][1]:.3f}; samples "
            f"to {bar:.3f}: distillation {samples['opd']}, GRPO {samples['grpo']}"
        )
    if options.picture:
        draw(runs, options.picture)
    print(json.dumps(result))
    held = all(r["opd"] is not None and (r["grpo"] is None or r["opd"] < r["grpo"]) for r in result.values())
    sys.exit(0 if held else "the student is not as good as it should be, or GRPO was quicker")


if __name__ == "__main__":
    main()
