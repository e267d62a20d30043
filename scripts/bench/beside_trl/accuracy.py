"""The share of held-out prompts that a model folder answers rightly, greedily; one judge for every trainer's models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from meshy.data.prompts import Chat
from meshy.data.task import Example
from meshy.rewards.addition import reward
from meshy.rewards.sample import RewardSample

PAD, END = 0, 1


@torch.no_grad()
def greedy_accuracy(folder: Path, chat: Chat, examples: Sequence[Example], max_new_tokens: int) -> float:
    """chat: of the model that both began with."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [chat.encode(example) for example in examples]
    longest = max(map(len, prompts))
    tokens = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    written = model.generate(
        input_ids=tokens, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=PAD,
        eos_token_id=END,
    )  # fmt: skip
    right = 0.0
    for example, row in zip(examples, written[:, longest:].tolist(), strict=True):
        response = row[: row.index(END)] if END in row else row
        right += reward(RewardSample(prompt=example.messages, response=chat.decode(response), answer=example.answer))
    return right / len(examples)
