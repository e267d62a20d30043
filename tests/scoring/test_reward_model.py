"""A reward model: the numbers that transformers' sequence classification gives, and what it is refused for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from meshy.scoring.reward_model import clipped, last_token
from tests.scoring.reward_rank import PADDING, rows
from tests.training.conftest import run_ranks
from tests.training.models import SHAPE

HOWS = [f"{model}, {layout}" for model in ("qwen3", "qwen2") for layout in ("packed", "padded")]


def make_classifier(kind: str, folder: Path, labels: int = 1) -> Path:
    torch.manual_seed(len(kind) + labels)
    shape = {**SHAPE, "num_key_value_heads": 2, "num_labels": labels, "pad_token_id": PADDING}
    if kind.startswith("qwen3"):
        model = Qwen3ForSequenceClassification(Qwen3Config(head_dim=16, **shape))
    else:
        model = Qwen2ForSequenceClassification(Qwen2Config(**shape))
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    model.save_pretrained(folder / kind)
    return folder / kind


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rewarded")
    for kind in ("qwen3", "qwen2"):
        make_classifier(kind, folder)
    return folder


@pytest.fixture(scope="module")
def scored(folder) -> dict[int, dict[str, dict[int, float]]]:
    """By the number of ranks."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(partial(run_ranks, folder, program="tests.scoring.reward_rank"), (1, 2)))
    results = {}
    for world in (1, 2):
        ranks = [torch.load(folder / f"rewarded.{world}.{rank}.pt") for rank in range(world)]
        assert all(rank[HOWS[0]] for rank in ranks), "each has rows"
        results[world] = {how: {k: v for rank in ranks for k, v in rank[how].items()} for how in ranks[0]}
    return results


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("how", HOWS)
def test_scores_are_those_of_transformers(folder, scored, world, how):
    model = AutoModelForSequenceClassification.from_pretrained(folder / how.split(",")[0])
    samples, scores = rows(), scored[world][how]
    assert sorted(scores) == list(range(len(samples)))
    width = max(len(sample.tokens) for sample in samples)
    batch = torch.full((len(samples), width), PADDING)
    for row, sample in zip(batch, samples, strict=True):
        row[: len(sample.tokens)] = sample.tokens
    with torch.no_grad():
        together = model(input_ids=batch, attention_mask=torch.ones_like(batch)).logits[:, 0]
        alone = torch.cat([model(input_ids=sample.tokens[None]).logits[:, 0] for sample in samples])
    actual = torch.tensor([scores[i] for i in range(len(samples))])
    torch.testing.assert_close(actual, alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(actual, together, rtol=0, atol=1e-5)
    assert actual.std() > 0.1, "they differ"


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("when", ["", ", few", ", one by one", ", after a turn of somebody else"])
def test_a_row_has_the_same_score_in_whatever_batch(scored, world, how, when):
    exact = "packed" in how or "turn" in when
    for i, score in scored[1][how].items():
        assert scored[world][how + when][i] == (score if exact else pytest.approx(score, abs=1e-6)), i


def test_the_last_token_is_the_last_that_is_no_padding():
    assert last_token(torch.tensor([5, 0, 7]), 0) == 2
    assert last_token(torch.tensor([5, 0, 7, 0, 0]), 0) == 2
    assert last_token(torch.tensor([5, 0, 7, 0, 0]), None) == 4
    assert last_token(torch.tensor([0, 0]), 0) == 0


def test_clipping_cuts_what_is_large_and_hides_nothing_that_is_broken():
    scores = torch.tensor([-9.0, -1.0, 2.5, float("inf"), float("nan")])
    assert torch.equal(clipped(scores, None)[:3], scores[:3])
    cut = clipped(scores, 2.0)
    assert cut[:3].tolist() == [-2.0, -1.0, 2.0]
    assert cut[3].isinf() and cut[4].isnan()
