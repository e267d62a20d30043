"""The reward model: a sequence classifier of right and wrong answers, read at an answer's last token.

It begins as a language model of the demo. So small a model judges poorly: it is for trying the role out.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForSequenceClassification

from meshy.data.addition import draw_pair
from scripts.demo_models.answers import right, wrong
from scripts.demo_models.language_model import save
from scripts.demo_models.lessons import MAX_DIGITS, Batch, padded
from scripts.demo_models.tokenizer import END, make_tokenizer, prompt_of
from scripts.demo_models.training import train

BASE = Path(__file__).parents[2] / "recipes" / "demo_teacher"
TASK_DIGITS = 5


def make_classifier(base: Path) -> Qwen3ForSequenceClassification:
    """The language model in `base` with a new head, from torch's seed; its output is the log odds of a right answer."""
    return Qwen3ForSequenceClassification.from_pretrained(
        base,
        num_labels=1,
        problem_type="multi_label_classification",  # transformers' name for binary cross-entropy
        dtype=torch.float32,
    )


def conversation(a: int, b: int, answer: str) -> str:
    """As a policy writes it, with its end."""
    return f"{prompt_of(a, b)}{answer}{END}"


def judgements(tokenizer: PreTrainedTokenizerFast, rng: random.Random, size: int) -> Iterator[Batch]:
    """Endless padded `input_ids`, int64 [size, length], and `labels`, float32 [size, 1]: 1 right, 0 wrong.

    Every pair of numbers comes with a right answer and a wrong one; rows of similar length share a batch.
    """
    while True:
        pool = []
        for _ in range(8 * size):
            a, b = draw_pair(rng, MAX_DIGITS, held_out=False)
            for answer, label in ((right(a, b, rng), 1.0), (wrong(a, b, rng)[0], 0.0)):
                pool.append((tokenizer.encode(conversation(a, b, answer)), label))
        pool.sort(key=lambda row: len(row[0]))
        starts = list(range(0, len(pool), size))
        rng.shuffle(starts)
        for start in starts:
            rows = pool[start : start + size]
            ids = padded([ids for ids, _ in rows], tokenizer.pad_token_id)
            yield ids, torch.tensor([[label] for _, label in rows])


def auc(positive: Float[Tensor, " right"], negative: Float[Tensor, " wrong"]) -> float:
    """The probability that a right answer scores above a wrong one; a tie counts half."""
    difference = positive[:, None] - negative[None, :]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


@torch.no_grad()
def scores(
    model: Qwen3ForSequenceClassification, tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> Float[Tensor, " texts"]:
    """Log odds, float32."""
    model.eval()
    parts = []
    for start in range(0, len(texts), 128):
        ids = padded([tokenizer.encode(text) for text in texts[start : start + 128]], tokenizer.pad_token_id)
        parts.append(model(input_ids=ids).logits[:, 0])
    return torch.cat(parts)


def report(model: Qwen3ForSequenceClassification, tokenizer: PreTrainedTokenizerFast, *, pairs: int = 1024) -> float:
    """Print how well it judges answers to held-out pairs of the task, each mistake by itself too; returns the AUC."""
    rng = random.Random(0)
    texts = defaultdict(list)
    for _ in range(pairs):
        a, b = draw_pair(rng, TASK_DIGITS, held_out=True)
        texts["right"].append(conversation(a, b, right(a, b, rng)))
        answer, mistake = wrong(a, b, rng)
        texts[mistake].append(conversation(a, b, answer))
    scored = {name: scores(model, tokenizer, some) for name, some in texts.items()}
    positive = scored.pop("right")
    for mistake, some in sorted(scored.items()):
        found = (some < 0).float().mean()
        print(f"{mistake:10}  {len(some):4d} answers, AUC {auc(positive, some):.3f}, {found:.3f} judged wrong")
    negative = torch.cat(list(scored.values()))
    reached, accuracy = auc(positive, negative), torch.cat([positive > 0, negative < 0]).float().mean()
    print(f"held out: {pairs} right answers and as many wrong, AUC {reached:.3f}, accuracy {accuracy:.3f}")
    return reached


def make_reward_model(out: Path, *, seed: int = 0, steps: int = 400, size: int = 64, base: Path = BASE) -> float:
    """The AUC over held-out pairs. size: rows of a batch."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_classifier(base)
    train(model, judgements(tokenizer, random.Random(seed), size), steps=steps, learning_rate=5e-4)
    reached = report(model, tokenizer)
    save(model, tokenizer, out)
    return reached
