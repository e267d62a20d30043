"""Meshy beside TRL's GRPOTrainer: one model, one task, one batch, the same cores, one after the other.

    python scripts/bench/vs_trl.py [--steps 60] [--only meshy|trl] [trainer.mini_batches=4 ...]

  samples/s   of Meshy / of TRL, over all steps but the first 3 and the last 3    at least 2.0
  wall time   of Meshy / of TRL, until accuracy 0.85 is reached                   at most 0.6

Accuracy is the mean training reward (0 to 1) over 5 batches in a row, for both; time counts from the first step's
start, without start-up. Afterwards one judge takes the greedy accuracy of both final models on the 256 held-out
prompts. Both draw the same prompts in the same order, and that they make the same tokens of them and start from equal
rewards is checked. Both take one optimiser step a batch, as TRL does by default, and write no checkpoints (but for
every tenth version of Meshy's). With more steps a batch (trainer.mini_batches=2 --trl-mini-batches 2) both learn
faster, and what is generated ahead is older in terms of them. Meshy runs recipes/justrl_fully_async.py with SETTINGS,
and arguments are further settings of it; TRL runs in `.venv-trl`, which is made when it is not there. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from meshy.data.addition import addition  # noqa: E402
from meshy.data.order import DataOrder  # noqa: E402
from meshy.data.prompts import Chat  # noqa: E402
from meshy.observe.jsonl import read_jsonl  # noqa: E402
from recipes.justrl_fully_async import recipe as recipe_of  # noqa: E402
from scripts.bench.beside_trl.accuracy import greedy_accuracy  # noqa: E402
from scripts.bench.beside_trl.curve import (  # noqa: E402
    Step,
    accuracies,
    differ_beyond_noise,
    reached,
    samples_per_second,
    seconds_to,
)

MODEL = ROOT / "recipes" / "demo_model"
DATA = "meshy.data.addition:addition"
MAX_DIGITS, MAX_NEW_TOKENS = 6, 104
TRL_ENVIRONMENT = ROOT / ".venv-trl"
TRL_PACKAGES = ("torch==2.13.0", "trl==1.16.0", "transformers==5.24.0", "accelerate==1.15.0", "datasets==5.2.0")
MORE_SAMPLES, LESS_TIME = 2.0, 0.6
MINI_BATCHES = 1
# On two cores, a window of three keeps both sides busy.
SETTINGS = (
    "rollout.window=3",
    "trainer.stream_minibatch=false",
    f"trainer.mini_batches={MINI_BATCHES}",
    "trainer.publish_in_flight=keep",
    "trainer.write_every=10",
    "trainer.tokens_per_micro_batch=2048",
)
Groups = Mapping[str, Sequence[float]]  # rewards by the prompt's id


def task_for_trl(options: argparse.Namespace, chat: Chat) -> dict[str, Any]:
    """What Meshy's recipe says, as TRL is to be told it. Its prompts stand in the order of Meshy's."""
    task = addition(seed=options.seed, max_digits=MAX_DIGITS)
    recipe = recipe_of(model=str(MODEL), data=DATA, gpus=2)
    trainer: Any = recipe.group("trainer").config
    rollout: Any = recipe.group("rollout").config
    order, count = DataOrder(len(task.train), options.seed), options.steps * trainer.batch_size // rollout.group_size
    examples = [task.train[order.index(position)] for position in range(count)]
    same = ("batch_size", "clip_low", "clip_high", "lr", "weight_decay", "betas", "eps", "max_grad_norm")
    return {
        "model": str(MODEL),
        "steps": options.steps,
        "group_size": rollout.group_size,
        "max_new_tokens": MAX_NEW_TOKENS,
        "seed": options.seed,
        "mini_batches": options.trl_mini_batches,
        "micro_batch": options.trl_micro_batch,
        "threads": options.trl_threads,
        "prompts": [
            {"prompt": [dict(message) for message in example.messages], "answer": example.answer, "id": example.id}
            for example in examples
        ],
        "tokens": [chat.encode(example) for example in examples],
        **{name: getattr(trainer, name) for name in same},
    }


def run(command: Sequence[str], output: Path, **environment: str) -> None:
    """RuntimeError with the last lines of its output where it fails."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "MESHY_DEVICE": "cpu", **environment},
        )  # fmt: skip
        try:
            status = process.wait(1800)
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
    if status:
        last = "\n".join(output.read_text(errors="replace").splitlines()[-40:])
        raise RuntimeError(f"{' '.join(command[:4])} ... ended with {status}\n{last}")


def trl_python() -> Path:
    """The interpreter of TRL's environment, made first if need be."""
    python, ready = TRL_ENVIRONMENT / "bin" / "python", TRL_ENVIRONMENT / ".ready"
    wanted = " ".join(TRL_PACKAGES)
    if not ready.exists() or ready.read_text() != wanted:
        print(f"making {TRL_ENVIRONMENT} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", TRL_ENVIRONMENT], check=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *TRL_PACKAGES], check=True
        )
        ready.write_text(wanted)
    return python


def run_trl(task: Mapping[str, Any], processes: int, folder: Path) -> tuple[list[Step], Groups, Path]:
    """Its steps, the rewards of its first batch, and its final model."""
    folder.mkdir(parents=True)
    (folder / "task.json").write_text(json.dumps(task))
    script = ROOT / "scripts" / "bench" / "beside_trl" / "trainer.py"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    launch = torchrun if processes > 1 else []
    run(
        [str(trl_python()), *launch, str(script), str(folder / "task.json"), str(folder)],
        folder / "output", OMP_NUM_THREADS=str(task["threads"]), HF_HUB_OFFLINE="1",
    )  # fmt: skip
    shares = [json.loads((folder / f"batches.{rank}.json").read_text()) for rank in range(processes)]
    steps = [
        Step(
            fmean(reward for part in parts for reward in part["rewards"]),
            parts[0]["started"],
            parts[0]["ended"],
            fmean(part["response_length_mean"] for part in parts),
        )
        for parts in zip(*shares, strict=True)
    ]
    first = by_prompt(pair for share in shares for pair in zip(share[0]["ids"], share[0]["rewards"], strict=True))
    return steps, first, folder / "model"


def run_meshy(options: argparse.Namespace, folder: Path) -> tuple[list[Step], Groups, Path]:
    """Its steps, the rewards of the prompts that it sent first, and its final model."""
    folder.mkdir(parents=True)
    run_dir = folder / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "meshy.ignitor", "recipes/justrl_fully_async.py", f"model={MODEL}", f"data={DATA}"]
    command += [
        f"data_options.max_digits={MAX_DIGITS}",
        f"sampling.max_new_tokens={MAX_NEW_TOKENS}",
        f"seed={options.seed}",
    ]
    chosen = dict(setting.split("=", 1) for setting in (*SETTINGS, *options.settings))
    command += [f"steps={options.steps}", "rollout.evaluate=false", *map("=".join, chosen.items())]
    run([*command, "--run-dir", str(run_dir)], folder / "output", OMP_NUM_THREADS="1")
    rows = read_jsonl(run_dir / "metrics.jsonl")
    steps = [Step(row["reward_mean"], row["started"], row["ended"], row["response_length_mean"]) for row in rows]
    lines = read_jsonl(run_dir / "trajectories.jsonl")
    rewards = by_prompt((line["prompt_id"], line["reward"]) for line in lines if max(line["weight_versions"]) == 0)
    return steps, rewards, run_dir / "weights" / f"v{options.steps}"


def by_prompt(rewards: Any) -> Groups:
    groups: dict[str, list[float]] = defaultdict(list)
    for prompt, reward in rewards:
        groups[prompt].append(reward)
    return groups


def report(name: str, steps: Sequence[Step], batch_size: int, target: float) -> dict[str, Any]:
    curve = accuracies(steps)
    seconds = seconds_to(steps, target)
    found = {
        "samples_per_second": samples_per_second(steps, batch_size),
        "seconds": seconds,
        "steps": reached(steps, target),
        "all_seconds": steps[-1].ended - steps[0].started,
        "accuracy_last": curve[-1],
        "response_length": fmean(step.length for step in steps),
    }
    when = "not there yet" if seconds is None else f"accuracy {target} in {seconds:.1f} s, {found['steps']} steps"
    rate, length = found["samples_per_second"], found["response_length"]
    print(f"  {name:<6} {rate:7.1f} samples/s of {length:.1f} tokens   {when}", flush=True)
    print("         accuracy, every 5 steps: " + " ".join(f"{value:.2f}" for value in curve[::5]), flush=True)
    return found


def verdict(meshy: Mapping[str, Any], trl: Mapping[str, Any], target: float) -> tuple[dict[str, float], list[str]]:
    """The ratios, and which bars are missed. A TRL that does not get there counts with all its time, in its favour."""
    ratios = {"samples_per_second": meshy["samples_per_second"] / trl["samples_per_second"]}
    missed = []
    if ratios["samples_per_second"] < MORE_SAMPLES:
        missed.append(f"{ratios['samples_per_second']:.3f} x the samples/s of TRL, at least {MORE_SAMPLES}")
    if meshy["seconds"] is None:
        return ratios, [*missed, f"Meshy did not reach accuracy {target}; more --steps"]
    ratios["seconds"] = meshy["seconds"] / (trl["seconds"] or trl["all_seconds"])
    if ratios["seconds"] > LESS_TIME:
        missed.append(f"{ratios['seconds']:.3f} of the wall time of TRL, at most {LESS_TIME}")
    return ratios, missed


def rounded(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """To three decimals, for the eye; bars are held against what was measured."""
    return {
        name: {key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}
        for name, found in results.items()
    }


def same_start(mine: Groups, theirs: Groups) -> list[str]:
    """What is wrong with the rewards under the initial weights, of the prompts that both have answered with them."""
    common = [(mine[prompt], theirs[prompt]) for prompt in theirs if prompt in mine]
    if len(common) < len(theirs) // 2:
        return [f"only {len(common)} of TRL's first {len(theirs)} prompts were answered by Meshy's initial weights"]
    means = [sum(map(sum, side)) / sum(map(len, side)) for side in zip(*common, strict=True)]
    print(f"  rewards at the start, of {len(common)} prompts: Meshy {means[0]:.3f}, TRL {means[1]:.3f}", flush=True)
    if differ_beyond_noise(common):
        return [f"initial rewards differ beyond noise: Meshy {means[0]:.3f}, TRL {means[1]:.3f}"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="batches that each of them trains")
    parser.add_argument("--accuracy", type=float, default=0.85)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("meshy", "trl"), help="run one of them, without bars")
    parser.add_argument("--trl-threads", type=int, default=1, help="of each of its processes")
    parser.add_argument(
        "--trl-processes", type=int, default=2, help="data-parallel ones; two threads of one are slower"
    )
    parser.add_argument("--trl-micro-batch", type=int, default=16, help="samples in one forward and backward pass")
    parser.add_argument(
        "--trl-mini-batches", type=int, default=MINI_BATCHES, help="optimiser steps that a batch is cut into"
    )
    parser.add_argument("settings", nargs="*", help="of Meshy's recipe")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends with us
    chat, held_out = Chat(MODEL), addition(seed=options.seed, max_digits=MAX_DIGITS).evaluation
    task = task_for_trl(options, chat)
    results: dict[str, dict[str, Any]] = {}
    firsts: dict[str, Groups] = {}
    print(f"{options.steps} batches of {task['batch_size']} samples on {os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        models = {}
        for name in ("meshy", "trl") if options.only is None else (options.only,):
            folder = Path(scratch) / name
            print(f"  {name} ... load {os.getloadavg()[0]:.1f}", flush=True)
            steps, firsts[name], models[name] = (
                run_meshy(options, folder) if name == "meshy" else run_trl(task, options.trl_processes, folder)
            )
            results[name] = report(name, steps, task["batch_size"], options.accuracy)
        for name, model in {"initial": MODEL, **models}.items():
            accuracy = greedy_accuracy(model, chat, held_out, MAX_NEW_TOKENS)
            print(f"  {name:<8} held-out greedy accuracy {accuracy:.3f}", flush=True)
            results.setdefault(name, {})["held_out"] = accuracy
    missed: list[str] = []
    if options.only is None:
        ratios, missed = verdict(results["meshy"], results["trl"], options.accuracy)
        missed += same_start(firsts["meshy"], firsts["trl"])
        results["meshy / trl"] = ratios
    for line in missed:
        print(line, file=sys.stderr)
    print(json.dumps(rounded(results)))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
