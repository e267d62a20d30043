"""What frozen models say of rows, on one rank and on two: as transformers says, in whatever batches and parts."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from meshy.scoring.likelihood import IMPOSSIBLE, likelihoods
from tests.scoring.data import CANDIDATES, TEMPERATURE, K, make_samples
from tests.training.conftest import run_ranks
from tests.training.models import SHAPE, make_model

SAMPLED, AT_CANDIDATES, TOP_IDS, TOP, VOCABULARY = range(5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("scored")
    for name in ("qwen3_tied", "qwen3"):
        make_model(name, folder)
    torch.manual_seed(5)
    config = Qwen3Config(head_dim=16, num_key_value_heads=2, num_labels=1, pad_token_id=0, **SHAPE)
    Qwen3ForSequenceClassification(config).save_pretrained(folder / "classifier")
    return folder


@pytest.fixture(scope="module")
def scored(folder) -> dict[int, dict]:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(partial(run_ranks, folder, program="tests.scoring.rank"), (1, 2)))
    results = {}
    for world in (1, 2):
        ranks = [torch.load(folder / f"scored.{world}.{rank}.pt") for rank in range(world)]
        rows = {name: value for rank in ranks for name, value in rank.items() if not isinstance(value, dict)}
        joined = {
            name: {k: v for rank in ranks for k, v in rank[name].items()} for name in ranks[0] if name not in rows
        }
        results[world] = {**rows, **joined}
    return results


def expected(folder: Path, name: str) -> list[list[torch.Tensor]]:
    """By transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder / name)
    rows = []
    for sample in make_samples():
        with torch.no_grad():
            logits = model(sample.tokens[None]).logits[0]
        before = torch.roll(torch.log_softmax(logits / TEMPERATURE, 1), 1, 0)
        mask = sample.loss_mask
        top = before.topk(K)
        columns = [
            before.gather(1, sample.tokens[:, None])[:, 0],
            before.gather(1, sample.columns[CANDIDATES].long()),
            top.indices.int(),
            top.values,
            before,
        ]
        rows.append([torch.where(mask.view(-1, *[1] * (c.dim() - 1)), c, torch.zeros_like(c)) for c in columns])
    return rows


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("how", "model"), [("padded", "qwen3_tied"), ("packed", "qwen3_tied"), ("untied", "qwen3")])
def test_log_probs_are_those_of_transformers(folder, scored, world, how, model):
    rows = scored[world][how]
    assert sorted(rows) == list(range(len(make_samples())))
    for i, columns in enumerate(expected(folder, model)):
        for actual, wanted in zip(rows[i], columns, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "how",
    ["packed, few", "packed, one by one", "in parts", "after a turn of somebody else"],
)
def test_a_row_is_scored_the_same_to_the_bit_in_whatever_batch_and_parts(scored, world, how):
    for i, columns in scored[1]["packed"].items():
        for actual, wanted in zip(scored[world][how][i], columns, strict=True):
            assert torch.equal(actual, wanted), (i, how)


def test_the_model_is_frozen(scored):
    assert not any(scored[1]["frozen"])


def test_a_new_value_head_says_nothing_and_a_classifiers_is_its_own(folder, scored):
    assert all(float(values.abs().max()) == 0 for values in scored[1]["new head"])
    model = AutoModelForSequenceClassification.from_pretrained(folder / "classifier")
    for world in (1, 2):
        for sample, values in zip(make_samples(), scored[world]["classifier"], strict=True):
            with torch.no_grad():
                hidden = model.model(sample.tokens[None]).last_hidden_state[0]
                wanted = torch.roll(model.score(hidden)[:, 0], 1)
            torch.testing.assert_close(values, torch.where(sample.loss_mask, wanted, 0.0), rtol=0, atol=2e-5)


def test_a_map_gives_the_policys_ids_the_own_tokens_log_probs():
    logits = torch.randn(6, 4)
    own = torch.log_softmax(logits, 1)
    token_map = torch.tensor([2, -1, 0])
    reduce = likelihoods(
        ("sampled", "topk", "vocabulary"),
        targets=torch.tensor([0, 1, 2, 0, 0, 2]),
        candidates=None,
        k=2,
        temperature=1.0,
        token_map=token_map,
    )
    sampled, ids, top, vocabulary = reduce(logits, 0, 6)
    assert torch.equal(vocabulary[:, 0], own[:, 2]) and torch.equal(vocabulary[:, 2], own[:, 0])
    assert (vocabulary[:, 1] == IMPOSSIBLE).all() and sampled[1] == IMPOSSIBLE
    assert torch.equal(top, own[:, [0, 2]].sort(dim=1, descending=True).values)
    assert set(ids.flatten().tolist()) == {0, 2}
