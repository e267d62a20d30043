"""What a replica makes of its SGLang server's answers, without a server."""

from __future__ import annotations

import pytest

from meshy.inference.sglang.replica import loads_of

LOAD = {"num_running_reqs": 2, "num_waiting_reqs": 1, "queues": {"paused": 3}, "num_used_tokens": 40}
LOAD |= {"gen_throughput": 5.0, "cache_hit_rate": 0.5}


def test_loads_are_summed_over_engines():
    told = loads_of(200, {"loads": [LOAD, LOAD]})
    assert told["running"] == 4 and told["queued"] == 8 and told["cache_hit_rate"] == 0.5


@pytest.mark.parametrize(
    ("status", "answer"),
    [(200, None), (200, []), (200, {}), (200, {"loads": 3}), (200, {"loads": [{}]}), (503, {"loads": [LOAD]})],
)
def test_any_other_answer_is_a_value_error_that_shows_it(status, answer):
    with pytest.raises(ValueError, match=f"/v1/loads answered {status}"):
        loads_of(status, answer)
