"""Supervised training of whatever model computes its own loss."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from scripts.demo_models.lessons import Batch


def train(model: PreTrainedModel, stream: Iterator[Batch], *, steps: int, learning_rate: float) -> None:
    """AdamW, a short warm-up and a linear decay; prints loss and seconds every 50 steps."""
    started = time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, max(0.05, (steps - step) / steps))
    )
    model.train()
    for step, (ids, labels) in zip(range(steps), stream, strict=False):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.monotonic() - started:6.1f} s", flush=True)
