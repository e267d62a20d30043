"""The server answers as SGLang was recorded to answer."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.request
from concurrent.futures import Future

import pytest
import torch

from meshy.generation.checksum import checksums
from tests.inference import recorded
from tests.inference.models import CONTEXT, VOCAB, byte_tokenizer, call, serve
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


def running(url: str) -> int:
    return call(url, "/v1/loads")[2]["loads"][0]["num_running_reqs"]


class Stream:
    """A streaming request read event by event, so that a test knows that it runs."""

    def __init__(self, url: str, **body) -> None:
        data = json.dumps({"input_ids": IDS, "stream": True, **body}).encode()
        self.response = urllib.request.urlopen(urllib.request.Request(url + "/generate", data=data), timeout=60)
        self.kind = self.response.headers["content-type"]
        self.events = (line[6:].strip() for line in self.response if line.startswith(b"data: "))

    def next(self):
        event = next(self.events)
        return event.decode() if event == b"[DONE]" else json.loads(event)

    def last(self):
        """The last event before [DONE]."""
        *_, last, done = self.events
        assert done == b"[DONE]"
        return json.loads(last)


# Information ----------------------------------------------------------------------------------------------------------


def test_health_and_information(server, folder):
    assert call(server, "/health") == call(server, "/health_generate") == (200, None, "")
    status, _, info = call(server, "/model_info")
    assert status == 200 and info.keys() >= recorded.MODEL_INFO_KEYS
    assert call(server, "/get_model_info")[2] == info
    assert info["weight_version"] == "0" and info["model_type"] == "qwen3" and info["model_path"] == str(folder)
    _, _, loads = call(server, "/v1/loads")
    assert loads.keys() >= recorded.LOADS_KEYS and loads["loads"][0].keys() >= recorded.LOAD_KEYS
    assert loads["loads"][0]["queues"].keys() == recorded.QUEUE_KEYS
    _, _, arguments = call(server, "/server_info")
    assert arguments["status"] == "ready" and arguments["context_length"] == CONTEXT
    assert arguments["max_running_requests"] == 8 and arguments["weight_version"] == "0"
    assert call(server, "/v1/models")[2]["data"][0]["max_model_len"] == CONTEXT
    assert call(server, "/nowhere") == (404, "application/json", {"detail": "Not Found"})
    assert call(server, "/generate")[0] == 405


# Generation -----------------------------------------------------------------------------------------------------------


def test_generate_with_every_kind_of_logprob(server):
    status, kind, answer = generate(
        server,
        sampling_params={"temperature": 0, "max_new_tokens": 4},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        token_ids_logprob=[5, 6],
        rid="r1",
    )
    meta = answer["meta_info"]
    assert status == 200 and kind == "application/json" and answer.keys() == {"text", "output_ids", "meta_info"}
    assert meta.keys() == (recorded.META_KEYS | recorded.LOGPROB_KEYS | recorded.TOP_KEYS | recorded.TOKEN_IDS_KEYS)
    assert meta["id"] == "r1" and meta["finish_reason"] == {"type": "length", "length": 4}
    assert meta["prompt_tokens"] == 12 and meta["completion_tokens"] == meta["output_token_logprobs_length"] == 4
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 4}] and meta["weight_version"] == "0"
    assert [token for _, token, _ in meta["input_token_logprobs"]] == IDS
    assert meta["input_token_logprobs"][0][0] is None and meta["input_top_logprobs"][0] is None
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in answer["output_ids"]]
    assert [row[0] for row in meta["output_top_logprobs"]] == meta["output_token_logprobs"]
    assert [[token for _, token, _ in row] for row in meta["output_token_ids_logprobs"]] == [[5, 6]] * 4


def test_generate_without_logprobs_and_from_text(server):
    _, _, plain = generate(server, sampling_params={"max_new_tokens": 2, "ignore_eos": True})
    assert plain["meta_info"].keys() == recorded.META_KEYS
    _, _, answer = call(
        server,
        "/generate",
        {
            "text": "hello",
            "sampling_params": {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True},
            "return_logprob": True,
            "return_text_in_logprobs": True,
        },
    )
    meta = answer["meta_info"]
    assert meta["prompt_tokens"] == 5 and meta["input_token_logprobs"] == []
    decode = byte_tokenizer().decode
    assert [word for *_, word in meta["output_token_logprobs"]] == [decode([token]) for token in answer["output_ids"]]
    assert answer["text"] == decode(answer["output_ids"], skip_special_tokens=True)


def test_a_prompt_is_scored_without_writing_anything(server):
    body = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    _, _, scored = generate(server, **body, sampling_params={"max_new_tokens": 0})
    _, _, longer = generate(server, **body, sampling_params={"max_new_tokens": 3})
    meta = scored["meta_info"]
    assert scored["output_ids"] == [] and meta["finish_reason"] == {"type": "length", "length": 0}
    assert meta["weight_version"] == "0" and meta["weight_versions"] == [] and meta["output_token_logprobs"] == []
    assert meta["input_token_logprobs"] == longer["meta_info"]["input_token_logprobs"]
    assert len(meta["input_top_logprobs"]) == len(IDS)


def test_batches_and_several_samples_give_a_flat_list(server):
    _, _, answers = call(
        server,
        "/generate",
        {"input_ids": [IDS, IDS[:5]], "sampling_params": {"max_new_tokens": 2, "n": 2, "ignore_eos": True}},
    )
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [12, 12, 5, 5]
    sampling = [{"max_new_tokens": 1}, {"max_new_tokens": 3, "ignore_eos": True}]
    _, _, answers = call(server, "/generate", {"input_ids": [IDS, IDS], "sampling_params": sampling, "rid": ["a", "b"]})
    assert [len(answer["output_ids"]) for answer in answers] == [1, 3]
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b"]


def test_seeds(server):
    def tokens(seed, n=1):
        sampling = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": seed, "n": n}
        answer = generate(server, sampling_params=sampling)[2]
        return [one["output_ids"] for one in answer] if n > 1 else answer["output_ids"]

    assert tokens(7) == tokens(7) != tokens(8)
    first, second = tokens(7, n=2)
    assert first == tokens(7) != second


def test_streaming_is_cumulative(server):
    sampling = {"max_new_tokens": 30, "ignore_eos": True, "sampling_seed": 1}
    stream = Stream(server, sampling_params=sampling, return_logprob=True)
    assert stream.kind == "text/event-stream; charset=utf-8"
    events = []
    while (event := stream.next()) != "[DONE]":
        events.append(event)
    whole = generate(server, sampling_params=sampling, return_logprob=True)[2]
    assert len(events) > 1
    for event in events[:-1]:
        n = len(event["output_ids"])
        assert event["output_ids"] == whole["output_ids"][:n] and event["meta_info"]["finish_reason"] is None
        assert event["meta_info"].keys() & recorded.ONLY_AT_THE_END == set()
        assert event["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"][:n]
        assert whole["text"].startswith(event["text"])
    assert events[-1]["output_ids"] == whole["output_ids"] and events[-1]["text"] == whole["text"]
    assert events[-1]["meta_info"].keys() == whole["meta_info"].keys()


def test_streams_of_a_batch_carry_their_index(server):
    stream = Stream(server, sampling_params={"max_new_tokens": 5, "ignore_eos": True, "n": 2})
    seen = {}
    while (event := stream.next()) != "[DONE]":
        seen[event["index"]] = event
    assert {index: len(event["output_ids"]) for index, event in seen.items()} == {0: 5, 1: 5}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"sampling_params": {"max_new_tokens": 2000}},
            recorded.TOO_LONG.format(limit=CONTEXT, total=2012, prompt=12, new=2000),
        ),
        ({"input_ids": IDS * 30}, recorded.PROMPT_TOO_LONG.format(prompt=360, limit=CONTEXT)),
        ({"sampling_params": {"temperature": -1}}, recorded.BAD_TEMPERATURE),
        ({"input_ids": None}, recorded.NO_INPUT),
        ({"input_ids": [VOCAB]}, f"{VOCAB}, which is not a token id in [0, {VOCAB})"),
        ({"input_ids": [3, -1]}, "-1, which is not a token id"),
        ({"input_ids": [3.5]}, "3.5, which is not a token id"),
        ({"input_ids": []}, "non-empty"),
        ({"input_ids": [[1], []]}, "non-empty"),
        ({"input_ids": "abc"}, "list of token ids"),
        ({"sampling_params": {"n": 0}}, "n must be a whole number of at least 1"),
        ({"sampling_params": [{}, {}]}, "2 entries for 1 prompts"),
        ({"sampling_params": 3}, "must be an object"),
        ({"return_logprob": True, "token_ids_logprob": [VOCAB]}, "token_ids_logprob"),
        ({"return_logprob": True, "logprob_start_len": 99}, "logprob_start_len"),
        ({"return_logprob": True, "top_logprobs_num": "many"}, "top_logprobs_num"),
        ({"lora_path": "x"}, "does not support the request field 'lora_path'"),
    ],
)
def test_what_cannot_be_served_is_refused_and_the_server_lives(server, body, message):
    status, kind, answer = generate(server, **body)
    assert (status, kind) == (400, "application/json") and message in answer["error"]["message"]
    assert generate(server, sampling_params={"max_new_tokens": 1})[0] == 200


def test_a_rid_in_use_is_refused(server):
    stream = Stream(server, rid="twice", sampling_params={"max_new_tokens": 200, "ignore_eos": True})
    stream.next()
    call(server, "/pause_generation", {"mode": "in_place"})
    status, _, answer = generate(server, rid="twice")
    assert status == 400 and "Duplicate request ID" in answer["error"]["message"]
    call(server, "/continue_generation", {})
    stream.last()


def test_bodies_that_are_no_json_objects(server):
    host, port = server.removeprefix("http://").split(":")
    for body, message in ((b"", "Field required"), (b"{", "not JSON"), (b"[1]", "must be a JSON object")):
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        connection.request("POST", "/continue_generation", body=body)
        answer = connection.getresponse()
        assert answer.status == 400 and message in answer.read().decode()
        connection.close()


def test_chat_completions(server):
    body = {
        "model": "x",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 1,
    }
    status, _, answer = call(server, "/v1/chat/completions", body)
    assert status == 200 and answer.keys() == recorded.CHAT_KEYS and answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice.keys() == recorded.CHOICE_KEYS and choice["finish_reason"] == "length"
    assert choice["message"].keys() == {"role", "content", "reasoning_content"}
    assert answer["usage"].keys() == recorded.USAGE_KEYS and answer["usage"]["completion_tokens"] == 3
    assert answer["metadata"]["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
    for entry in choice["logprobs"]["content"]:
        assert entry.keys() == {"token", "bytes", "logprob", "top_logprobs"}
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]

    template = byte_tokenizer().apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
    sampling = {"temperature": 0, "max_new_tokens": 3}
    same = call(server, "/generate", {"input_ids": template, "sampling_params": sampling})[2]
    assert same["text"] == choice["message"]["content"]
    assert answer["usage"]["prompt_tokens"] == len(template)

    several = call(server, "/v1/chat/completions", {**body, "n": 3, "temperature": 1, "seed": 4})[2]
    assert [one["index"] for one in several["choices"]] == [0, 1, 2]
    assert call(server, "/v1/chat/completions", {**body, "messages": []})[0] == 400
    assert call(server, "/v1/chat/completions", {**body, "tools": [{}]})[0] == 400


# Control --------------------------------------------------------------------------------------------------------------


def test_pause_and_continue(server):
    stream = Stream(server, sampling_params={"max_new_tokens": 240, "ignore_eos": True})
    stream.next()
    assert call(server, "/pause_generation", {"mode": "retract"})[::2] == (200, recorded.PAUSED)
    assert call(server, "/health")[0] == 503
    assert call(server, "/flush_cache", {}) == (200, None, recorded.FLUSHED)
    late = in_background(generate, server, sampling_params={"max_new_tokens": 2, "ignore_eos": True})
    until(lambda: call(server, "/v1/loads")[2]["loads"][0]["queues"]["paused"] == 1, "the late request to arrive")
    assert call(server, "/continue_generation", {})[::2] == (200, recorded.CONTINUED)
    assert late.result(60)[2]["meta_info"]["completion_tokens"] == 2
    last = stream.last()["meta_info"]
    assert last["completion_tokens"] == 240 and last["num_retractions"] in (0, 1)
    assert call(server, "/health")[0] == 200
    status, _, answer = call(server, "/pause_generation", {"mode": "bogus"})
    assert status == 400 and answer["object"] == "error" and "mode" in answer["message"]


def test_pause_aborts_by_default(server):
    stream = Stream(server, sampling_params={"max_new_tokens": 240, "ignore_eos": True})
    stream.next()
    call(server, "/pause_generation", {})
    call(server, "/continue_generation", {})
    reason = stream.last()["meta_info"]["finish_reason"]
    assert reason in (recorded.ABORTED, {"type": "length", "length": 240})


def test_flush_is_refused_while_busy(server):
    stream = Stream(server, sampling_params={"max_new_tokens": 240, "ignore_eos": True})
    stream.next()
    call(server, "/pause_generation", {"mode": "in_place"})
    held = running(server)
    assert call(server, "/flush_cache", {}) == (
        (400, None, recorded.NOT_FLUSHED) if held else (200, None, recorded.FLUSHED)
    )
    call(server, "/continue_generation", {})
    stream.last()
    assert call(server, "/flush_cache", method="POST") == (200, None, recorded.FLUSHED)


def test_abort_by_rid_and_all(server):
    for body in ({"rid": "gone"}, {"abort_all": True}):
        call(server, "/pause_generation", {"mode": "retract"})
        future = in_background(generate, server, rid="gone", sampling_params={"max_new_tokens": 5})
        until(lambda: call(server, "/v1/loads")[2]["loads"][0]["queues"]["paused"] == 1, "the request to arrive")
        assert call(server, "/abort_request", body) == (200, None, "")
        answer = future.result(60)[2]
        assert answer["meta_info"]["finish_reason"]["type"] == "abort" and answer["output_ids"] == []
        call(server, "/continue_generation", {})
    assert call(server, "/abort_request", {"rid": "unknown"}) == (200, None, "")


def test_a_client_that_goes_away_gives_its_slot_back(server):
    call(server, "/pause_generation", {"mode": "retract"})
    host, port = server.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request("POST", "/generate", body=json.dumps({"input_ids": IDS}))
    held = lambda: call(server, "/v1/loads")[2]["loads"][0]["queues"]["paused"]  # noqa: E731
    until(lambda: held() == 1, "the request to arrive")
    connection.close()
    until(lambda: held() == 0, "the request to be dropped")
    call(server, "/continue_generation", {})


# Weights and memory ---------------------------------------------------------------------------------------------------


def test_update_checksum_and_memory(server, folder, model_folders):
    other = model_folders["other"]

    def sums():
        status, _, answer = call(server, "/weights_checker", {"action": "checksum"})
        assert status == 200 and answer["success"]
        return answer["ranks"][0]["checksums"]

    def expected(source):
        return checksums(reference(source).named_parameters())

    assert sums() == expected(folder)
    status, _, answer = call(server, "/update_weights_from_disk", {"model_path": str(other), "weight_version": "7"})
    assert (status, answer) == (
        200,
        {"success": True, "message": recorded.UPDATED.format(version="7"), "num_paused_requests": 0},
    )
    assert sums() == expected(other) != expected(folder)
    info = call(server, "/model_info")[2]
    assert info["weight_version"] == "7" and info["model_path"] == str(other) and info["tokenizer_path"] == str(folder)
    _, _, written = generate(server, sampling_params={"temperature": 0, "max_new_tokens": 9}, return_logprob=True)
    tokens = torch.tensor([[*IDS, *written["output_ids"]]])
    with torch.no_grad():
        rows = torch.log_softmax(reference(other)(tokens).logits[0, len(IDS) - 1 : -1], -1)
    got = torch.tensor([entry[0] for entry in written["meta_info"]["output_token_logprobs"]])
    torch.testing.assert_close(got, rows.max(-1).values, atol=1e-5, rtol=0)

    status, _, answer = call(server, "/update_weights_from_disk", {"model_path": "/nowhere", "weight_version": "8"})
    assert status == 400 and answer["success"] is False and "/nowhere" in answer["message"]
    assert call(server, "/model_info")[2]["weight_version"] == "7" and sums() == expected(other)

    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        assert call(server, path, {"tags": ["kv_cache", "weights"]}) == (200, "application/json", None)
    assert sums() == expected(other)
    assert call(server, "/release_memory_occupation", {"tags": ["everything"]})[0] == 400
    call(server, "/release_memory_occupation", {"tags": ["weights"]})
    assert "released" in call(server, "/weights_checker", {"action": "checksum"})[2]["error"]["message"]
    call(server, "/resume_memory_occupation", {"tags": ["weights"]})

    body = {"new_version": "0", "abort_all_requests": False}
    call(server, "/update_weights_from_disk", {"model_path": str(folder)})
    assert call(server, "/update_weight_version", body)[2] == {
        "success": True,
        "message": "Weight version updated to 0",
        "new_version": "0",
    }
    assert call(server, "/weights_checker", {"action": "snapshot"})[0] == 400


def test_the_server_ends_in_good_order_and_answers_what_it_holds(folder):
    with serve(folder, "--weight-version", "12") as (url, process):
        call(url, "/pause_generation", {"mode": "retract"})
        future = in_background(generate, url, sampling_params={"max_new_tokens": 5})
        until(lambda: call(url, "/v1/loads")[2]["loads"][0]["queues"]["paused"] == 1, "the request to arrive")
        assert call(url, "/model_info")[2]["weight_version"] == "12"
        process.terminate()
        assert process.wait(20) == 0
        assert future.result(20)[2]["meta_info"]["finish_reason"]["type"] == "abort"
