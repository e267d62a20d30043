"""The student: it can add, but has two bad habits.

First it learns to add with written-out columns (`7+5=12 4+8+1=13 3+0+1=4 #432`), from short numbers to long ones.
Then it sees careless demonstrations: the longer the numbers, the more often they blurt the sum out (`#432`), which this
model gets right for short numbers only; and now and then a written-out carry is forgotten. Reinforcement learning has
to find out that working pays, and carrying too.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch

from scripts.demo_models.answers import careless
from scripts.demo_models.language_model import make_model, report, save
from scripts.demo_models.lessons import MAX_DIGITS, batches, lessons
from scripts.demo_models.tokenizer import make_tokenizer
from scripts.demo_models.training import train


def make_student(out: Path, *, seed: int = 0, steps: int = 1300, careless_steps: int = 150, size: int = 64) -> None:
    """About a million parameters. steps: of careful demonstrations; size: rows of a batch."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, hidden_size=128, layers=4)
    rng = random.Random(seed)
    train(model, lessons(tokenizer, rng, size, steps), steps=steps, learning_rate=2e-3)
    report(model, tokenizer, "careful")
    stream = batches(tokenizer, rng, size, MAX_DIGITS, careless)
    train(model, stream, steps=careless_steps, learning_rate=3e-4)
    report(model, tokenizer, "careless")
    save(model, tokenizer, out)
