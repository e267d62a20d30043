"""The teacher: a larger model that has seen careful demonstrations only, in the student's way of writing."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from scripts.demo_models.language_model import make_model, report, save
from scripts.demo_models.lessons import lessons
from scripts.demo_models.tokenizer import make_tokenizer
from scripts.demo_models.training import train


def make_teacher(out: Path, *, seed: int = 0, steps: int = 1000, size: int = 64) -> None:
    """About two million parameters. size: rows of a batch."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, hidden_size=160, layers=6)
    train(model, lessons(tokenizer, random.Random(seed), size, steps), steps=steps, learning_rate=2e-3)
    report(model, tokenizer, "teacher")
    save(model, tokenizer, out)
