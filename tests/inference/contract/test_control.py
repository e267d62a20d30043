"""Pause, continue, abort and flush: what becomes of requests in flight, on both engines."""

from __future__ import annotations

import pytest

from tests.inference import recorded
from tests.inference.contract.served import ENDLESS, Served, Stream, spans


def test_retract_goes_on_with_the_new_weights(served: Served):
    stream = Stream(served, sampling_params=ENDLESS, rid="long")
    before = len(stream.until(3)["output_ids"])
    assert served.call("/pause_generation", {"mode": "retract"})[::2] == (200, recorded.PAUSED)
    assert served.call("/flush_cache", {}) == (200, None, recorded.FLUSHED)  # nothing runs any more
    late = served.in_background(sampling_params={"max_new_tokens": 2, "ignore_eos": True})
    status, _, answer = served.load(served.other, "5")
    assert (status, answer["message"]) == (200, recorded.UPDATED.format(version="5"))
    assert not late.done()  # sent while paused, it waits
    assert served.call("/continue_generation", {})[::2] == (200, recorded.CONTINUED)
    assert spans(late.result(60)[2]) == [("5", 0, 2)]
    last = stream.last()
    (first, _, middle), (second, _, end) = spans(last)
    assert (first, second, end) == ("0", "5", ENDLESS["max_new_tokens"]) and middle >= before
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": end}
    assert last["meta_info"]["num_retractions"] == 1 and last["meta_info"]["weight_version"] == "5"


def test_in_place_keeps_the_cache(served: Served):
    stream = Stream(served, sampling_params=ENDLESS, rid="long")
    stream.until(3)
    served.pause("in_place")
    assert served.ok("/v1/loads")["loads"][0]["num_running_reqs"] == 1
    assert served.call("/flush_cache", {}) == (400, None, recorded.NOT_FLUSHED)
    assert served.load(served.other, "6", flush_cache=False)[0] == 200
    served.go_on()
    last = stream.last()
    assert [version for version, _, _ in spans(last)] == ["0", "6"]
    assert last["meta_info"]["num_retractions"] == 0
    served.flush()


def test_in_place_with_a_flush_is_refused(served: Served):
    stream = Stream(served, sampling_params=ENDLESS, rid="long")
    stream.until(3)
    served.pause("in_place")
    status, _, answer = served.load(served.other, "7")
    assert status == 400 and answer["success"] is False and "flush" in answer["message"]
    served.ok("/abort_request", {"abort_all": True})
    served.go_on()
    stream.last()
    served.restore()


def test_abort_is_the_default_of_a_pause(served: Served):
    stream = Stream(served, sampling_params=ENDLESS)
    stream.until(2)
    assert served.call("/pause_generation", {})[0] == 200
    last = stream.last()  # it is answered while the engine is paused
    assert last["meta_info"]["finish_reason"] == recorded.ABORTED
    assert spans(last)[0][0] == "0" and len(last["output_ids"]) >= 2


def test_an_unknown_mode_is_refused(served: Served):
    status, _, answer = served.call("/pause_generation", {"mode": "bogus"})
    assert status == 400 and answer["object"] == "error" and "mode" in answer["message"]
    assert served.generate(sampling_params={"max_new_tokens": 1})[0] == 200


@pytest.mark.parametrize("body", [{"rid": "gone"}, {"abort_all": True}])
def test_abort(served: Served, body):
    stream = Stream(served, sampling_params=ENDLESS, rid="gone")
    stream.until(2)
    assert served.call("/abort_request", body) == (200, None, "")
    last = stream.last()
    assert last["meta_info"]["finish_reason"] == recorded.ABORTED and len(last["output_ids"]) >= 2
    assert served.call("/abort_request", {"rid": "unknown"}) == (200, None, "")


def test_abort_of_what_is_retracted(served: Served):
    """It is answered at once, with what was written, before the engine goes on."""
    stream = Stream(served, sampling_params=ENDLESS, rid="held")
    stream.until(2)
    served.pause("retract")
    assert served.call("/abort_request", {"rid": "held"}) == (200, None, "")
    last = stream.last()
    assert last["meta_info"]["finish_reason"]["type"] == "abort" and len(last["output_ids"]) >= 2


def test_flush_is_refused_while_busy(served: Served):
    stream = Stream(served, sampling_params=ENDLESS)
    stream.until(2)
    served.pause("in_place")
    assert served.call("/flush_cache", {}) == (400, None, recorded.NOT_FLUSHED)
    served.ok("/abort_request", {"abort_all": True})
    served.go_on()
    stream.last()
    served.flush()


def test_an_update_without_a_pause_waits_for_running_requests(served: Served):
    stream = Stream(served, sampling_params={"max_new_tokens": 200, "ignore_eos": True})
    stream.until(2)
    assert served.load(served.other, "8")[0] == 200
    assert spans(stream.last()) == [("0", 0, 200)]
    assert served.version == "8"


def test_an_update_may_abort_what_runs(served: Served):
    stream = Stream(served, sampling_params=ENDLESS)
    stream.until(2)
    assert served.load(served.other, "9", abort_all_requests=True)[0] == 200
    last = stream.last()
    assert last["meta_info"]["finish_reason"]["type"] == "abort" and [v for v, _, _ in spans(last)] == ["0"]
