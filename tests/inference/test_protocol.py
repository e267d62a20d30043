"""Where the embedded engine does more than SGLang does, or says more. What both must do stands in `contract/`."""

from __future__ import annotations

import http.client
import json
import threading
import time
from concurrent.futures import Future

import pytest

from meshy.generation.checksum import checksums
from tests.inference import recorded
from tests.inference.models import CONTEXT, JSON, VOCAB, call, serve
from tests.inference.test_parity import reference

IDS = list(range(40, 52))


def generate(url: str, **body):
    return call(url, "/generate", {"input_ids": IDS, **body})


def in_background(function, *arguments, **options) -> Future:
    future: Future = Future()

    def run():
        try:
            future.set_result(function(*arguments, **options))
        except Exception as error:  # noqa: BLE001 - the waiting test gets it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def until(condition, what: str):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, f"waited 30 s for {what}"
        time.sleep(0.005)


def held(url: str) -> int:
    """Requests that have come while the engine is paused; SGLang does not count them."""
    return call(url, "/v1/loads")[2]["loads"][0]["queues"]["paused"]


def test_answers_have_every_key_that_was_recorded(server):
    """SGLang gives the times only with --enable-metrics; this engine always does."""
    _, _, plain = generate(server, sampling_params={"max_new_tokens": 2, "ignore_eos": True})
    assert plain["meta_info"].keys() == recorded.META_KEYS


def test_nothing_written_has_no_span(server):
    _, _, scored = generate(server, return_logprob=True, sampling_params={"max_new_tokens": 0})
    assert scored["meta_info"]["weight_versions"] == []


def test_seeds(server):
    def tokens(seed, n=1):
        sampling = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": seed, "n": n}
        answer = generate(server, sampling_params=sampling)[2]
        return [one["output_ids"] for one in answer] if n > 1 else answer["output_ids"]

    assert tokens(7) == tokens(7) != tokens(8)
    first, second = tokens(7, n=2)
    assert first == tokens(7) != second


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": [VOCAB]}, f"{VOCAB}, which is not a token id in [0, {VOCAB})"),
        ({"input_ids": [3, -1]}, "-1, which is not a token id"),
        ({"input_ids": [3.5]}, "3.5, which is not a token id"),
        ({"input_ids": [[1], []]}, "non-empty"),
        ({"input_ids": "abc"}, "list of token ids"),
        ({"sampling_params": {"n": 0}}, "n must be a whole number of at least 1"),
        ({"sampling_params": [{}, {}]}, "2 entries for 1 prompts"),
        ({"sampling_params": 3}, "must be an object"),
        ({"return_logprob": True, "token_ids_logprob": [VOCAB]}, "token_ids_logprob"),
        ({"return_logprob": True, "top_logprobs_num": "many"}, "top_logprobs_num"),
        ({"lora_path": "x"}, "does not support the request field 'lora_path'"),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(server, body, message):
    status, kind, answer = generate(server, **body)
    assert (status, kind) == (400, "application/json") and message in answer["error"]["message"]
    assert generate(server, sampling_params={"max_new_tokens": 1})[0] == 200


def test_the_context_length_is_exact(server):
    status, _, answer = generate(server, sampling_params={"max_new_tokens": CONTEXT - len(IDS) + 1})
    message = recorded.TOO_LONG.format(limit=CONTEXT, total=CONTEXT + 1, prompt=12, new=CONTEXT - 11)
    assert status == 400 and message in answer["error"]["message"]


def test_a_rid_in_use_is_refused(server):
    call(server, "/pause_generation", {"mode": "retract"})
    first = in_background(generate, server, rid="twice", sampling_params={"max_new_tokens": 2})
    until(lambda: held(server) == 1, "the request to arrive")
    status, _, answer = generate(server, rid="twice")
    assert status == 400 and "Duplicate request ID" in answer["error"]["message"]
    call(server, "/continue_generation", {})
    assert first.result(60)[0] == 200


def test_bodies_that_are_no_json_objects(server):
    host, port = server.removeprefix("http://").split(":")
    for body, message in ((b"", "Field required"), (b"{", "not JSON"), (b"[1]", "must be a JSON object")):
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        connection.request("POST", "/continue_generation", body=body, headers=JSON)
        answer = connection.getresponse()
        assert answer.status == 400 and message in answer.read().decode()
        connection.close()


def test_chat_with_tools_is_refused(server):
    body = {"model": "x", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "tools": [{}]}
    assert call(server, "/v1/chat/completions", body)[0] == 400


def test_health_tells_at_once_that_it_is_paused(server):
    call(server, "/pause_generation", {"mode": "retract"})
    assert call(server, "/health")[0] == 503
    call(server, "/continue_generation", {})
    assert call(server, "/health")[0] == 200


def test_a_request_that_has_not_begun_can_be_aborted(server):
    for body in ({"rid": "gone"}, {"abort_all": True}):
        call(server, "/pause_generation", {"mode": "retract"})
        future = in_background(generate, server, rid="gone", sampling_params={"max_new_tokens": 5})
        until(lambda: held(server) == 1, "the request to arrive")
        assert call(server, "/abort_request", body) == (200, None, "")
        answer = future.result(60)[2]
        assert answer["meta_info"]["finish_reason"]["type"] == "abort" and answer["output_ids"] == []
        call(server, "/continue_generation", {})


def test_a_client_that_goes_away_gives_its_slot_back(server):
    call(server, "/pause_generation", {"mode": "retract"})
    host, port = server.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request("POST", "/generate", body=json.dumps({"input_ids": IDS}), headers=JSON)
    until(lambda: held(server) == 1, "the request to arrive")
    connection.close()
    until(lambda: held(server) == 0, "the request to be dropped")
    call(server, "/continue_generation", {})


def test_checksums_are_of_the_models_own_tensors(server, folder):
    """SGLang's are of its fused and padded tensors."""
    _, _, answer = call(server, "/weights_checker", {"action": "checksum"})
    assert answer["ranks"][0]["checksums"] == checksums(reference(folder).named_parameters())
    assert call(server, "/weights_checker", {"action": "snapshot"})[0] == 400


def test_what_is_released_cannot_be_used(server):
    assert call(server, "/release_memory_occupation", {"tags": ["everything"]})[0] == 400
    call(server, "/release_memory_occupation", {"tags": ["weights"]})
    assert "released" in call(server, "/weights_checker", {"action": "checksum"})[2]["error"]["message"]
    call(server, "/resume_memory_occupation", {"tags": ["weights"]})
    assert call(server, "/weights_checker", {"action": "checksum"})[0] == 200


def test_the_server_ends_in_good_order_and_answers_what_it_holds(folder):
    with serve(folder, "--weight-version", "12") as (url, process):
        call(url, "/pause_generation", {"mode": "retract"})
        future = in_background(generate, url, sampling_params={"max_new_tokens": 5})
        until(lambda: held(url) == 1, "the request to arrive")
        assert call(url, "/model_info")[2]["weight_version"] == "12"
        process.terminate()
        assert process.wait(20) == 0
        assert future.result(20)[2]["meta_info"]["finish_reason"]["type"] == "abort"
