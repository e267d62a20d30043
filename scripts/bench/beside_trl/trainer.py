"""TRL's GRPOTrainer on the task that a JSON file describes; started by `vs_trl.py` in TRL's own environment.

    .venv-trl/bin/python scripts/bench/beside_trl/trainer.py TASK.json FOLDER

Each process has its share of every batch, and writes FOLDER/batches.<rank>.json (one entry a batch, see `Notes`). The
weights after the last step come to FOLDER/model.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from meshy.rewards.addition import reward  # noqa: E402
from meshy.rewards.sample import RewardSample  # noqa: E402


class Notes:
    """Of each batch: `rewards` in TRL's order, its prompts' `ids`, `started` and `ended` in unix seconds."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []
        self.boundary = 0.0

    def score(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        """TRL's reward function."""
        texts = [completion[0]["content"] for completion in completions]
        rewards = [
            reward(RewardSample(prompt=prompt, response=text, answer=answer, finish_reason="stop", info={}))
            for prompt, text, answer in zip(prompts, texts, columns["answer"], strict=True)
        ]
        lengths = [len(ids) for ids in columns["completion_ids"]]
        self.batches.append(
            {"rewards": rewards, "ids": columns["id"], "response_length_mean": sum(lengths) / len(lengths)}
        )
        return rewards

    def end(self) -> None:
        now = time.time()
        self.batches[-1] |= {"started": self.boundary, "ended": now}
        self.boundary = now


def build(task: dict[str, Any], notes: Notes, scratch: Path) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    per_batch = task["mini_batches"]

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            notes.boundary = time.time()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % per_batch == 0:
                notes.end()

    torch.set_num_threads(task["threads"])
    share = task["batch_size"] // per_batch // int(os.environ.get("WORLD_SIZE", "1"))
    micro = min(task["micro_batch"], share)
    config = GRPOConfig(
        output_dir=str(scratch),
        max_steps=task["steps"] * per_batch,
        # One `generate` of the whole batch, then `per_batch` optimiser steps. Continuous batching takes five times as
        # long on CPUs.
        generation_batch_size=task["batch_size"],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=share // micro,
        num_generations=task["group_size"],
        max_completion_length=task["max_new_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        shuffle_dataset=False,
        loss_type="dapo",
        scale_rewards="group",
        epsilon=task["clip_low"],
        epsilon_high=task["clip_high"],
        beta=0.0,
        learning_rate=task["lr"],
        lr_scheduler_type="constant",
        weight_decay=task["weight_decay"],
        adam_beta1=task["betas"][0],
        adam_beta2=task["betas"][1],
        adam_epsilon=task["eps"],
        max_grad_norm=task["max_grad_norm"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        optim="adamw_torch",
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=task["seed"],
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32),
        reward_funcs=notes.score,
        args=config,
        train_dataset=Dataset.from_list(task["prompts"]),
        processing_class=AutoTokenizer.from_pretrained(task["model"]),
        callbacks=[Clock()],
    )
    check_tokens(trainer, task)
    return trainer


def check_tokens(trainer: Any, task: dict[str, Any]) -> None:
    """SystemExit where TRL makes other tokens of a prompt than Meshy does."""
    tokens = trainer._tokenize_prompts([row["prompt"] for row in task["prompts"]])[0]
    for row, mine, theirs in zip(task["prompts"], task["tokens"], tokens, strict=True):
        if list(theirs) != mine:
            raise SystemExit(f"prompt {row['id']}: TRL makes {list(theirs)} of it, Meshy {mine}")


def main() -> None:
    task_file, folder = Path(sys.argv[1]), Path(sys.argv[2])
    task = json.loads(task_file.read_text())
    notes = Notes()
    trainer = build(task, notes, folder / "trainer")
    trainer.train()
    (folder / f"batches.{os.environ.get('RANK', 0)}.json").write_text(json.dumps(notes.batches))
    trainer.save_model(str(folder / "model"))


if __name__ == "__main__":
    main()
