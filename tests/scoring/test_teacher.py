"""A teacher over a real queue: what it writes, and rows that cannot be scored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from meshy.scoring.service import check_finite
from meshy.service.exits import Unrecoverable
from meshy.titan.micro_batch import Sample
from tests.scoring.data import CANDIDATES as SEEDED
from tests.scoring.data import make_samples
from tests.scoring.stage import CANDIDATES, Stage, recipe_of

DEMO = Path(__file__).parents[2] / "recipes" / "demo_model"

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage(recipe_of(str(DEMO), rows=64)) as stage:
        yield stage


def samples(count: int, seed: int = 0) -> list[Sample]:
    return [replace(s, columns={CANDIDATES: s.columns[SEEDED]}) for s in make_samples(count, seed)]


def test_every_row_gets_the_teachers_log_probs_of_its_candidates(stage: Stage):
    rows = samples(24)
    stage.put(rows[:10], 0)
    stage.put(rows[10:], 1)
    stage.score_all(24)
    columns = stage.read(24)
    model = AutoModelForCausalLM.from_pretrained(DEMO)
    by_uid = dict(zip(columns["uid"], columns["teacher_topk_logprobs"], strict=True))
    for i, sample in enumerate(rows):
        written = by_uid[f"0.{i}" if i < 10 else f"1.{i - 10}"]
        with torch.no_grad():
            before = torch.roll(torch.log_softmax(model(sample.tokens[None]).logits[0], 1), 1, 0)
        wanted = before.gather(1, sample.columns[CANDIDATES].long())
        torch.testing.assert_close(written, torch.where(sample.loss_mask[:, None], wanted, 0.0), rtol=0, atol=2e-5)
    stage.clear()


def test_a_first_token_that_nothing_predicts_is_refused_by_name(stage: Stage):
    bad = replace(samples(1)[0], loss_mask=torch.ones(len(samples(1)[0].tokens), dtype=torch.bool))
    stage.put([bad], 3)
    with pytest.raises(Unrecoverable, match=r"row 3\.0: its first token"):
        stage.score_all(1)
    stage.service.fetcher.forget(["3.0"])


def test_numbers_that_are_none_are_never_written():
    rows = type("Rows", (), {"uids": ("a", "b")})()
    check_finite(rows, {"x": [torch.zeros(2), torch.ones(1)], "ids": [torch.tensor([1]), torch.tensor([2])]})
    with pytest.raises(Unrecoverable, match="row b: x holds NaN or infinite"):
        check_finite(rows, {"x": [torch.zeros(2), torch.tensor([1.0, float("inf")])]})
