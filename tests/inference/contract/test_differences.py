"""The table of differences is the one in the documentation, and SGLang still is as it says."""

from __future__ import annotations

import pytest

from meshy.inference.sglang.arguments import CONTEXT_MARGIN
from tests.inference import recorded
from tests.inference.contract.differences import DIFFERENCES, on_page, table
from tests.inference.contract.served import CONTEXT, ENDLESS, IDS, Served, Stream


def test_the_page_shows_the_table():
    assert on_page() == table(), "run `python -m tests.inference.contract.differences`"
    assert len({difference.what for difference in DIFFERENCES}) == len(DIFFERENCES)


def real_sglang(test):
    """Marks a test of SGLang's side of the table."""
    return pytest.mark.sglang(pytest.mark.timeout(300)(test))


@real_sglang
def test_its_context_length_has_a_margin(real: Served):
    assert real.limit == CONTEXT + CONTEXT_MARGIN
    beyond = {"max_new_tokens": CONTEXT - len(IDS) + 1}
    assert real.generate(sampling_params=beyond)[0] == 200


@real_sglang
def test_its_seeds_have_no_effect_on_cpu(real: Served):
    sampling = {"max_new_tokens": 30, "ignore_eos": True, "sampling_seed": 7}
    assert real.written(sampling_params=sampling)["output_ids"] != real.written(sampling_params=sampling)["output_ids"]


@real_sglang
def test_it_serves_what_has_no_sense(real: Served):
    few = {"max_new_tokens": 2}
    assert real.generate(sampling_params={**few, "n": 0})[0] == 200
    assert real.generate(input_ids=[[1], []], sampling_params=few)[0] == 200
    assert real.generate(sampling_params=[few, few])[0] == 500


@real_sglang
def test_it_loads_weights_and_refuses(real: Served):
    before = real.checksums()
    stream = Stream(real, sampling_params=ENDLESS)
    stream.until(2)
    real.pause("in_place")
    assert real.load(real.other, "2")[0] == 400
    assert real.checksums() != before
    real.ok("/abort_request", {"abort_all": True})
    real.go_on()
    stream.last()
    real.restore()


@real_sglang
def test_its_tensors_are_fused(real: Served):
    assert "model.layers.0.self_attn.qkv_proj.weight" in real.checksums()


@real_sglang
def test_a_response_without_tokens_has_a_span(real: Served):
    answer = real.written(
        sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0, top_logprobs_num=1
    )
    assert answer["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 0}]
    assert len(answer["meta_info"]["output_top_logprobs"]) == 1


@real_sglang
def test_times_are_left_out(real: Served):
    assert not real.written(sampling_params={"max_new_tokens": 1})["meta_info"].keys() & recorded.TIMING_KEYS
