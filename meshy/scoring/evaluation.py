"""How well a model that scores does itself on the held-out prompts: what the policy can hope for."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import torch

from meshy.data.task import Example, Task
from meshy.device import give_back
from meshy.importing import load
from meshy.observe.runfolder import write_json
from meshy.rewards.pool import RewardPool
from meshy.rewards.sample import RewardSample
from meshy.service import Context

log = logging.getLogger("meshy.scoring")

BATCH = 64  # answers that are generated together


def evaluate_model(context: Context, folder: Path, count: int, device: torch.device) -> None:
    """Greedy answers to the first `count` held-out prompts, scored by the run's own reward; the mean goes into the run
    folder as `<group>_eval.json`. Nothing is done where it is there already: the model does not change."""
    file = context.folder.own_eval(context.group.id)
    if file.exists():
        return
    began, recipe = time.monotonic(), context.recipe
    task: Task = load(recipe.data)(**{"seed": recipe.seed, **recipe.data_options})
    examples = list(task.evaluation[:count])
    if not examples:
        log.warning("%s: the task has no held-out prompts, so it is not evaluated", folder)
        return
    answers = greedy_answers(folder, examples, _chat_options(context), recipe.sampling.max_new_tokens, device)
    chosen = next((reward for group in recipe.groups if (reward := getattr(group.config, "reward", None))), task.reward)
    scores = asyncio.run(_scores(chosen, examples, answers))
    accuracy = sum(scores) / len(scores)
    log.info("%s: accuracy %.3f over %d prompts", folder, accuracy, len(scores))
    write_json(
        file, {"accuracy": accuracy, "count": len(scores), "model": str(folder), "seconds": time.monotonic() - began}
    )


def _chat_options(context: Context) -> dict[str, Any]:
    """Those with which the policy's prompts are written."""
    given = (getattr(group.config, "chat_template_options", None) for group in context.recipe.groups)
    return dict(next((options for options in given if options), {}))


@torch.inference_mode()
def greedy_answers(
    folder: Path, examples: list[Example], chat_options: dict[str, Any], max_new_tokens: int, device: torch.device
) -> list[str]:
    """By transformers' own `generate`; the model is gone from the device afterwards."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    own = model.generation_config  # whose penalties and bans are left out: the policy is measured without, too
    ends = tokenizer.eos_token_id if own.eos_token_id is None else own.eos_token_id
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    greedy = GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=ends, pad_token_id=pad)
    answers: list[str] = []
    for start in range(0, len(examples), BATCH):
        texts = [
            tokenizer.apply_chat_template(
                [dict(message) for message in example.messages],
                tokenize=False,
                add_generation_prompt=True,
                **chat_options,
            )
            for example in examples[start : start + BATCH]
        ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
        inputs.pop("token_type_ids", None)
        output = model.generate(**inputs, generation_config=greedy)
        answers += tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        log.info("%s: %d of %d held-out prompts answered", folder, len(answers), len(examples))
    del model
    give_back(device)
    return answers


async def _scores(reward: Any, examples: list[Example], answers: list[str]) -> list[float]:
    """An answer that cannot be scored counts 0."""
    async with RewardPool(reward, workers=1) as pool:
        samples = [
            RewardSample(prompt=e.messages, response=answer, answer=e.answer, info=e.info)
            for e, answer in zip(examples, answers, strict=True)
        ]
        return [result.value or 0.0 for result in await pool.score(samples)]
