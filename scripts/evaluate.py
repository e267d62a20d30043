"""Measure a run's exported weights a second time, without Meshy's engine: a fresh `transformers` load and `generate`.

    python scripts/evaluate.py runs/grpo_sync-20260101-120000            the newest version
    python scripts/evaluate.py runs/grpo_sync-20260101-120000 --version 0

Prints one JSON line: weight_version, accuracy, count.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshy.importing import load
from meshy.observe.runfolder import RunFolder, versions_in
from meshy.rewards import RewardSample
from meshy.service.context import Launch

BATCH = 64


@torch.inference_mode()
def accuracy(run: Path, version: int | None, limit: int | None) -> dict[str, float]:
    """Mean reward of greedy answers to the task's held-out prompts."""
    launch = Launch.read(run / "launch.json")
    recipe, _ = launch.derive()
    task = load(recipe.data)(seed=recipe.seed, **recipe.data_options)
    chosen = [reward for group in recipe.groups if (reward := getattr(group.config, "reward", None))]
    reward = load(chosen[0] if chosen else task.reward)  # as the run itself measured
    version, folder = weights(run, version, Path(launch.model_folder))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    examples = task.evaluation[:limit]
    scores = []
    for start in range(0, len(examples), BATCH):
        batch = examples[start : start + BATCH]
        texts = [
            tokenizer.apply_chat_template([dict(m) for m in e.messages], tokenize=False, add_generation_prompt=True)
            for e in batch
        ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        inputs.pop("token_type_ids", None)
        output = model.generate(**inputs, do_sample=False, max_new_tokens=recipe.sampling.max_new_tokens)
        answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for example, text, answer in zip(batch, texts, answers, strict=True):
            sample = RewardSample(prompt=text, response=answer, answer=example.answer, finish_reason="stop", info={})
            scores.append(float(reward(sample)))
    return {"weight_version": version, "accuracy": sum(scores) / len(scores), "count": len(scores)}


def weights(run: Path, version: int | None, initial: Path) -> tuple[int, Path]:
    """The folder of a version of the run; version 0 is the initial model."""
    folder = RunFolder(run)
    kept = versions_in(folder.weights)
    wanted = max(kept, default=0) if version is None else version
    if wanted == 0:
        return 0, initial
    if wanted not in kept:
        sys.exit(f"{folder.weights} keeps versions {kept}, not {wanted}")
    return wanted, folder.weights_of(wanted)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--version", type=int)
    parser.add_argument("--limit", type=int, help="only so many prompts")
    arguments = parser.parse_args()
    print(json.dumps(accuracy(arguments.run, arguments.version, arguments.limit)))
