"""The likeliest tokens beside each written one, as a distillation asks for them, whichever engine it is."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from meshy.generation import Completion, GenerationClient, commands
from meshy.recipe import Sampling
from tests.generation.orders import load_of
from tests.inference.contract.served import CONTEXT, IDS, Served, Stream, spans
from tests.inference.models import VOCAB

K = 5


def check(answer: Any, count: int, least_of: float) -> None:
    """Candidates are the likeliest tokens, in order, with the log-probs that the sampled tokens have. least_of: the
    share of sampled tokens that are to be among them."""
    meta, tokens = answer["meta_info"], answer["output_ids"]
    rows, scored = meta["output_top_logprobs"], meta["output_token_logprobs"]
    assert len(rows) == len(scored) == len(tokens)
    found = 0
    for row, (logprob, token, _) in zip(rows, scored, strict=True):
        logprobs, ids = [entry[0] for entry in row], [entry[1] for entry in row]
        assert len(set(ids)) == len(row) == count and all(0 <= id < VOCAB for id in ids)
        assert logprobs == sorted(logprobs, reverse=True)
        if token in ids:
            found += 1
            assert logprobs[ids.index(token)] == pytest.approx(logprob, abs=1e-5)
        else:
            assert logprob <= logprobs[-1]
    assert found >= least_of * len(tokens)


def asked(served: Served, count: int, **sampling: Any) -> Any:
    """A hundred tokens with that many candidates each."""
    params = {"max_new_tokens": 100, "ignore_eos": True, **sampling}
    return served.written(sampling_params=params, return_logprob=True, top_logprobs_num=count)


def test_the_argmax_is_the_first_candidate(served: Served):
    answer = asked(served, K, temperature=0)
    check(answer, K, 1.0)
    assert [row[0][1] for row in answer["meta_info"]["output_top_logprobs"]] == answer["output_ids"]


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.6}, {"top_p": 0.5, "top_k": 4}])
def test_candidates_agree_with_the_sampled_tokens(served: Served, sampling):
    """Of the distribution that was sampled from, with its temperature, before any filter."""
    check(asked(served, K, **sampling), K, 0.05)


def test_all_tokens_as_candidates_make_up_the_distribution(served: Served):
    answer = asked(served, VOCAB, temperature=0.7, top_p=0.3)
    check(answer, VOCAB, 1.0)
    for row in answer["meta_info"]["output_top_logprobs"]:
        assert np.exp([entry[0] for entry in row]).sum() == pytest.approx(1, abs=1e-4)


def test_requests_side_by_side_get_as_many_as_each_asked_for(served: Served):
    body = {
        "input_ids": [IDS, IDS[:7], IDS[:5], IDS[:9]],
        "sampling_params": {"max_new_tokens": 20, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": [3, 0, 8, 3],
    }
    answers = served.ok("/generate", body)
    for answer, count in zip(answers, body["top_logprobs_num"], strict=True):
        if count:
            check(answer, count, 0)
        else:
            assert not any(answer["meta_info"].get("output_top_logprobs") or ())


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_candidates_survive_a_pause_in_the_middle(served: Served, mode: str):
    sampling = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
    body = {"sampling_params": sampling, "return_logprob": True, "top_logprobs_num": K}
    whole = served.written(**body)
    stream = Stream(served, **body)
    seen = stream.until(3)
    served.pause(mode)
    served.go_on()
    last = stream.last()
    assert last["meta_info"]["num_retractions"] == (mode == "retract")
    assert last["output_ids"] == whole["output_ids"] and len(last["output_ids"]) > len(seen["output_ids"])
    check(last, K, 1.0)
    for row, other in zip(
        last["meta_info"]["output_top_logprobs"], whole["meta_info"]["output_top_logprobs"], strict=True
    ):
        assert [entry[0] for entry in row] == pytest.approx([entry[0] for entry in other], abs=1e-3)


def test_candidates_are_those_of_the_weights_that_wrote_the_token(served: Served):
    """An update in the middle, under `retract`, as Meshy publishes."""
    sampling = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
    stream = Stream(served, sampling_params=sampling, return_logprob=True, top_logprobs_num=K)
    stream.until(3)
    served.pause("retract")
    assert served.load(served.other, "1")[0] == 200
    served.go_on()
    last = stream.last()
    assert [version for version, *_ in spans(last)] == ["0", "1"]
    check(last, K, 1.0)


def test_through_the_client(served: Served):
    """A request that is aborted in the middle and taken up again has candidates for each of its tokens."""

    async def ask() -> Completion:
        async with GenerationClient([served.url], vocab_size=VOCAB, deadline=60) as client:
            sampling = Sampling(max_new_tokens=CONTEXT - len(IDS), temperature=0.0)
            asked = asyncio.create_task(client.generate(IDS, sampling, candidates=K))
            while not (await load_of(client, served.url))["num_running_reqs"]:
                await asyncio.sleep(0.002)
            await client.everywhere(commands.pause("abort"))
            await client.everywhere(commands.CONTINUE)
            return await asked

    done = asyncio.run(ask())
    assert done.parts > 1 and done.candidates is not None
    ids, logprobs = done.candidates.ids, done.candidates.logprobs
    assert ids.shape == logprobs.shape == (len(done.tokens), K)
    assert ids[:, 0].tolist() == done.tokens
    np.testing.assert_allclose(logprobs[:, 0], np.array(done.logprobs), atol=1e-5)
    assert (np.diff(logprobs, axis=1) <= 0).all()
