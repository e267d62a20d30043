"""A reward model: the numbers that transformers' sequence classification gives, and what it is refused for."""

from __future__ import annotations

import shutil
import signal
import time
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

from meshy.columns import TRAIN
from meshy.models import TOKENIZERS
from meshy.observe.jsonl import read_jsonl
from meshy.refusals import value_faults
from meshy.scoring.reward_model import clipped, last_token
from meshy.scoring.reward_model_config import RewardModelConfig
from meshy.topology import derive_topology, gpu_list
from scripts.demo_models.reward_model import make_classifier as make_untrained
from scripts.demo_models.tokenizer import END, make_tokenizer
from tests.launch import ROOT, launched
from tests.scoring.reward_rank import PADDING, rows
from tests.scoring.rewarded import recipe as recipe_of
from tests.training.conftest import run_ranks
from tests.training.models import SHAPE

DEMO = ROOT / "recipes" / "demo_model"
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


# What it is refused for -----------------------------------------------------------------------------------------------


def whole(folder: Path) -> Path:
    """With the demo's tokenizer beside it."""
    for name in (*TOKENIZERS, "tokenizer_config.json"):
        if (DEMO / name).is_file():
            shutil.copy(DEMO / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory) -> Path:
    """Of the demo's tokenizer: the demo's policy under a head of random numbers."""
    torch.manual_seed(2)
    folder = tmp_path_factory.mktemp("reward_model")
    make_untrained(DEMO).save_pretrained(folder)
    return whole(folder)


def preflight(model: Path | str, **fields) -> list[str]:
    recipe = recipe_of(str(model))
    return RewardModelConfig(model=str(model), **fields).preflight(recipe)


def test_one_that_fits_is_accepted_and_its_column_is_what_the_trainer_waits_for(reward_model):
    recipe = recipe_of(str(reward_model))
    assert preflight(reward_model) == [] and value_faults(recipe) == []
    contract = derive_topology(recipe, gpu_list(1, 3)).contract.partition(TRAIN)
    assert contract.columns["model_reward"].type == "scalar float32"
    assert contract.writers["reward_model"] == ("model_reward", "ack.reward_model")
    assert {"model_reward", "ack.reward_model"} <= set(contract.end_consumer.columns)


def test_what_keeps_a_model_from_being_one_is_said_before_anything_is_started(reward_model, tmp_path):
    (fault,) = preflight(DEMO)
    assert "hold no score.weight" in fault and "trained as one" in fault
    (fault,) = preflight(whole(make_classifier("qwen3", tmp_path, labels=2)))
    assert "gives 2 numbers" in fault and "num_labels=1" in fault
    (fault,) = preflight(tmp_path / "nowhere")
    assert "there is no model folder" in fault

    other = tmp_path / "other"
    shutil.copytree(reward_model, other)
    text = (other / "tokenizer.json").read_text()
    assert text.count('"<|tool|>"') >= 2
    (other / "tokenizer.json").write_text(text.replace('"<|tool|>"', '"<|else|>"'))
    (fault,) = preflight(other)
    assert "tokenizer is not the policy's: id 5 is '<|tool|>'" in fault and "take a model of the same" in fault
    assert "token_map" not in fault, "it has none"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"column": "model reward"}, "column: expected a name"),
        ({"clip": 0.0}, "clip: expected more than 0, or none, got 0.0"),
        ({"rows": 33}, "rows: 33 never come together"),
    ],
)
def test_fields_that_cannot_be_are_refused(fields, told):
    (fault,) = RewardModelConfig(model="somewhere", **fields).faults(recipe_of("somewhere"))
    assert told in fault


# A run ----------------------------------------------------------------------------------------------------------------


def scores_of(folder: Path, lines: list[dict]) -> torch.Tensor:
    """What transformers says of trajectories: [lines]."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), make_tokenizer()
    scores = []
    for line in lines:
        (message,) = line["prompt"]
        text = f"<|user|>{message['content']}{END}<|assistant|>{line['response']}"
        ended = line["finish_reason"] == "stop"
        assert len(tokenizer.encode(line["response"])) + ended == line["response_tokens"], "its text is not all of it"
        ids = tokenizer.encode(text + END * ended)
        with torch.no_grad():
            scores.append(model(input_ids=torch.tensor([ids])).logits[0, 0])
    return torch.stack(scores)


@pytest.mark.e2e
@pytest.mark.prove
@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        pytest.param(("replicas=2",), 4, id="beside"),
        pytest.param(("colocated=true",), 1, id="in a ring"),
    ],
)
def test_its_number_is_what_the_trainer_learns_from(reward_model, tmp_path, settings, slots):
    settings = (f"reward_model={reward_model}", *settings)
    with launched(tmp_path, *settings, recipe="tests/scoring/rewarded.py", slots=slots) as run:
        assert run.wait(170) == 0, run.output
    steps, lines = read_jsonl(tmp_path / "metrics.jsonl"), read_jsonl(tmp_path / "trajectories.jsonl")
    assert [step["samples"] for step in steps] == [32, 32]
    for step in steps:
        scores = scores_of(reward_model, [line for line in lines if line["step"] == step["step"]])
        assert scores.std() > 0.01, "there is something to learn"
        assert step["reward_mean"] == pytest.approx(float(scores.mean()), abs=1e-4)
        assert step["reward_std"] == pytest.approx(float(scores.std(correction=0)), abs=1e-4)
        assert step["grad_norm"] > 0


@pytest.mark.e2e
@pytest.mark.prove
def test_a_reward_model_that_is_killed_is_started_again_and_no_row_is_lost(reward_model, tmp_path):
    settings = (f"reward_model={reward_model}", "trainer.batch_size=64")
    with launched(tmp_path, *settings, recipe="tests/scoring/rewarded.py", slots=3) as run:
        end = time.monotonic() + 120
        while not read_jsonl(tmp_path / "trajectories.jsonl"):
            assert time.monotonic() < end, run.output
            time.sleep(0.02)
        run.service("reward_model.0").send_signal(signal.SIGKILL)
        assert run.wait(170) == 0, run.output
    assert "restart 1 of 3" in run.output
    steps, lines = read_jsonl(tmp_path / "metrics.jsonl"), read_jsonl(tmp_path / "trajectories.jsonl")
    assert [step["samples"] for step in steps] == [64, 64]
    for step in steps:
        scores = scores_of(reward_model, [line for line in lines if line["step"] == step["step"]])
        assert step["reward_mean"] == pytest.approx(float(scores.mean()), abs=1e-4)
