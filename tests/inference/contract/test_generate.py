"""What both engines answer to requests: status codes, keys, finish reasons, log-probs' shapes, errors."""

from __future__ import annotations

import asyncio
import http.client

import pytest

from meshy.generation import GenerationClient, GenerationError
from meshy.recipe import Sampling
from tests.inference import recorded
from tests.inference.contract.served import CONTEXT, IDS, RUNNING, Served, Stream, spans
from tests.inference.models import JSON, byte_tokenizer

META = recorded.META_KEYS - recorded.TIMING_KEYS


def test_health_and_information(served: Served):
    assert served.call("/health") == served.call("/health_generate") == (200, None, "")
    info = served.ok("/model_info")
    assert info.keys() >= recorded.MODEL_INFO_KEYS
    assert served.ok("/get_model_info").keys() == info.keys()
    assert info["weight_version"] == "0" and info["model_type"] == "qwen3"
    assert info["model_path"] == info["tokenizer_path"] == str(served.folder)
    loads = served.ok("/v1/loads")
    assert loads.keys() >= recorded.LOADS_KEYS and loads["loads"][0].keys() >= recorded.LOAD_KEYS
    assert loads["loads"][0]["queues"].keys() == recorded.QUEUE_KEYS
    arguments = served.ok("/server_info")
    assert arguments["status"] == "ready" and arguments["context_length"] == served.limit
    assert arguments["max_running_requests"] == RUNNING and arguments["weight_version"] == "0"
    assert arguments["tp_size"] == arguments["dp_size"] == 1
    assert served.ok("/v1/models")["data"][0]["max_model_len"] == served.limit
    assert served.call("/nowhere") == (404, "application/json", {"detail": "Not Found"})
    assert served.call("/generate")[0] == 405


def test_every_kind_of_logprob(served: Served):
    status, kind, answer = served.generate(
        sampling_params={"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        token_ids_logprob=[5, 6],
        rid="r1",
    )
    meta = answer["meta_info"]
    assert status == 200 and kind == "application/json" and answer.keys() == {"text", "output_ids", "meta_info"}
    assert meta.keys() >= (META | recorded.LOGPROB_KEYS | recorded.TOP_KEYS | recorded.TOKEN_IDS_KEYS)
    assert meta["id"] == "r1" and meta["finish_reason"] == {"type": "length", "length": 4}
    assert meta["prompt_tokens"] == 12 and meta["completion_tokens"] == meta["output_token_logprobs_length"] == 4
    assert spans(answer) == [("0", 0, 4)] and meta["weight_version"] == "0"
    assert [token for _, token, _ in meta["input_token_logprobs"]] == IDS
    assert meta["input_token_logprobs"][0][0] is None and meta["input_top_logprobs"][0] is None
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in answer["output_ids"]]
    assert [row[0] for row in meta["output_top_logprobs"]] == meta["output_token_logprobs"]
    assert [[token for _, token, _ in row] for row in meta["output_token_ids_logprobs"]] == [[5, 6]] * 4


def test_text_without_and_with_logprobs(served: Served):
    plain = served.written(sampling_params={"max_new_tokens": 2, "ignore_eos": True})
    assert plain["meta_info"].keys() >= META and not plain["meta_info"].keys() & recorded.LOGPROB_KEYS
    answer = served.ok(
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
    words = [byte_tokenizer().decode([token]) for token in answer["output_ids"]]
    assert [word for *_, word in meta["output_token_logprobs"]] == words
    assert answer["text"] == served.text_of(answer["output_ids"])


def test_a_prompt_is_scored_without_writing_anything(served: Served):
    body = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    scored = served.written(**body, sampling_params={"max_new_tokens": 0})
    longer = served.written(**body, sampling_params={"max_new_tokens": 3})
    meta = scored["meta_info"]
    assert scored["output_ids"] == [] and meta["finish_reason"] == {"type": "length", "length": 0}
    assert meta["weight_version"] == "0" and meta["output_token_logprobs"] == []
    assert len(meta["input_top_logprobs"]) == len(IDS)
    told, again = ([entry[0] for entry in one["meta_info"]["input_token_logprobs"]] for one in (scored, longer))
    assert told[0] is None and told[1:] == pytest.approx(again[1:], abs=1e-5)


def test_batches_and_several_samples_give_a_flat_list(served: Served):
    sampling = {"max_new_tokens": 2, "n": 2, "ignore_eos": True}
    answers = served.ok("/generate", {"input_ids": [IDS, IDS[:5]], "sampling_params": sampling})
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [12, 12, 5, 5]
    each = [{"max_new_tokens": 1}, {"max_new_tokens": 3, "ignore_eos": True}]
    answers = served.ok("/generate", {"input_ids": [IDS, IDS], "sampling_params": each, "rid": ["a", "b"]})
    assert [len(answer["output_ids"]) for answer in answers] == [1, 3]
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b"]


def test_stop_tokens_and_strings(served: Served):
    first, second = served.greedy(2)["output_ids"]
    stopped = served.written(sampling_params={"temperature": 0, "max_new_tokens": 9, "stop_token_ids": [second]})
    assert stopped["output_ids"][:1] == [first] and stopped["output_ids"][-1] == second
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": second}
    text = served.greedy(30)["text"]
    stop = next((char for char in text if char.isascii() and char.isprintable()), None)
    assert stop is not None, text
    ended = served.written(sampling_params={"temperature": 0, "max_new_tokens": 30, "ignore_eos": True, "stop": [stop]})
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert ended["text"] == text[: text.index(stop)]


def test_streaming_is_cumulative(served: Served):
    sampling = {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True}
    stream = Stream(served, sampling_params=sampling, return_logprob=True)
    assert stream.kind == "text/event-stream; charset=utf-8"
    events = []
    while (event := stream.next()) != "[DONE]":
        events.append(event)
    whole = served.written(sampling_params=sampling, return_logprob=True)
    assert len(events) > 1
    for event in events[:-1]:
        n = len(event["output_ids"])
        assert event["output_ids"] == whole["output_ids"][:n] and event["meta_info"]["finish_reason"] is None
        scored = [entry[0] for entry in event["meta_info"]["output_token_logprobs"]]
        expected = [entry[0] for entry in whole["meta_info"]["output_token_logprobs"][:n]]
        assert scored == pytest.approx(expected, abs=1e-4)
        assert whole["text"].startswith(event["text"])
    assert events[-1]["output_ids"] == whole["output_ids"] and events[-1]["text"] == whole["text"]
    assert spans(events[-1]) == [("0", 0, 30)]


def test_streams_of_a_batch_carry_their_index(served: Served):
    stream = Stream(served, sampling_params={"max_new_tokens": 5, "ignore_eos": True, "n": 2})
    seen = {}
    while (event := stream.next()) != "[DONE]":
        seen[event["index"]] = event
    assert {index: len(event["output_ids"]) for index, event in seen.items()} == {0: 5, 1: 5}


def test_an_episode_may_fill_the_context(served: Served):
    """Prompt and response together are as long as the context length that was asked for, whatever the engine."""
    whole = served.written(sampling_params={"max_new_tokens": CONTEXT - len(IDS), "ignore_eos": True})
    assert len(whole["output_ids"]) == CONTEXT - len(IDS)
    long = served.ok("/generate", {"input_ids": [3] * (CONTEXT - 1), "sampling_params": {"max_new_tokens": 1}})
    assert len(long["output_ids"]) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"sampling_params": {"max_new_tokens": 2000}}, recorded.TOO_LONG),
        ({"input_ids": IDS * 100}, recorded.PROMPT_TOO_LONG),
        ({"sampling_params": {"temperature": -1}}, recorded.BAD_TEMPERATURE),
        ({"input_ids": None}, recorded.NO_INPUT),
        ({"return_logprob": True, "logprob_start_len": 99}, "logprob_start_len"),
        ({"input_ids": []}, "empty"),
    ],
)
def test_what_cannot_be_served_is_refused_and_the_server_lives(served: Served, body, message: str):
    status, kind, answer = served.generate(**body)
    assert (status, kind) == (400, "application/json")
    prompt = len(body.get("input_ids") or IDS)
    assert (
        message.format(limit=served.limit, total=prompt + 2000, new=2000, prompt=prompt) in answer["error"]["message"]
    )
    assert served.generate(sampling_params={"max_new_tokens": 1})[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        {"sampling_params": 3},
        {"input_ids": "abc"},
        {"input_ids": [3.5]},
        {"return_logprob": True, "top_logprobs_num": "many"},
        {"lora_path": "x"},
    ],
)
def test_what_has_no_sense_is_refused(served: Served, body):
    assert served.generate(**body)[:2] == (400, "application/json")


def test_bodies_that_are_no_json_objects(served: Served):
    host, port = served.url.removeprefix("http://").split(":")
    for body in (b"", b"{", b"[1]"):
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        connection.request("POST", "/continue_generation", body=body, headers=JSON)
        assert connection.getresponse().status == 400
        connection.close()


def test_the_client_passes_on_why_a_prompt_was_refused(served: Served):
    async def ask() -> None:
        async with GenerationClient([served.url], deadline=30) as client:
            await client.generate(IDS * 100, Sampling(max_new_tokens=5))

    with pytest.raises(GenerationError, match=r"1200 tokens\) is longer than the model's context length"):
        asyncio.run(ask())


def test_chat_completions(served: Served):
    body = {
        "model": "x",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 1,
    }
    answer = served.ok("/v1/chat/completions", body)
    assert answer.keys() == recorded.CHAT_KEYS and answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice.keys() == recorded.CHOICE_KEYS and choice["finish_reason"] == "length"
    assert choice["message"].keys() == {"role", "content", "reasoning_content"}
    assert answer["usage"].keys() == recorded.USAGE_KEYS and answer["usage"]["completion_tokens"] == 3
    assert answer["metadata"]["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
    for entry in choice["logprobs"]["content"]:
        assert entry.keys() == {"token", "bytes", "logprob", "top_logprobs"}
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]

    template = byte_tokenizer().apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
    same = served.ok("/generate", {"input_ids": template, "sampling_params": {"temperature": 0, "max_new_tokens": 3}})
    assert same["text"] == choice["message"]["content"]
    assert answer["usage"]["prompt_tokens"] == len(template)

    several = served.ok("/v1/chat/completions", {**body, "n": 3, "temperature": 1, "seed": 4})
    assert [one["index"] for one in several["choices"]] == [0, 1, 2]
    assert served.call("/v1/chat/completions", {**body, "messages": []})[0] == 400
