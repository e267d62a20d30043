"""Both engines compute what `transformers` computes, and so the same as one another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.inference.contract.served import IDS, Served
from tests.inference.test_parity import logprobs_of, reference

TOLERANCE = 1e-4
PROMPTS = [IDS, [7, 8, 9], list(range(1, 90)), [200] * 33]


def scored(answer, kind: str) -> list[float]:
    return [entry[0] for entry in answer["meta_info"][f"{kind}_token_logprobs"]]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_tokens_are_scored_as_transformers_scores_them(served: Served, temperature: float):
    model = reference(served.folder)
    for prompt in PROMPTS:
        sampling = {"temperature": temperature, "top_p": 0.9, "max_new_tokens": 40, "ignore_eos": True}
        answer = served.written(input_ids=prompt, sampling_params=sampling, return_logprob=True)
        tokens = answer["output_ids"]
        rows = logprobs_of(model, [*prompt, *tokens], temperature)[len(prompt) - 1 :]
        expected = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        assert scored(answer, "output") == pytest.approx(expected, abs=TOLERANCE)


def test_greedy_tokens_are_the_likeliest(served: Served):
    model = reference(served.folder)
    for prompt in PROMPTS:
        answer = served.greedy(60, input_ids=prompt)
        rows = logprobs_of(model, [*prompt, *answer["output_ids"]])[len(prompt) - 1 :]
        assert answer["output_ids"] == rows.argmax(-1).tolist()
        assert scored(answer, "output") == pytest.approx(rows.max(-1).values.tolist(), abs=TOLERANCE)


@pytest.mark.sglang
@pytest.mark.timeout(300)
def test_the_engines_equal_one_another(folders: tuple[Path, Path], embedded_engine: Served, sglang_engine: Served):
    for prompt in PROMPTS:
        body = {"input_ids": prompt, "logprob_start_len": 0}
        one, two = embedded_engine.greedy(80, **body), sglang_engine.greedy(80, **body)
        assert one["output_ids"] == two["output_ids"]
        assert one["text"] == embedded_engine.text_of(one["output_ids"])
        assert two["text"] == sglang_engine.text_of(two["output_ids"])
        assert scored(one, "output") == pytest.approx(scored(two, "output"), abs=TOLERANCE)
        assert scored(one, "input")[1:] == pytest.approx(scored(two, "input")[1:], abs=TOLERANCE)
