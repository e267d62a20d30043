"""The client's rules, without I/O."""

from __future__ import annotations

import hashlib

import pytest
import torch

from meshy.generation.balance import FAILURE_PENALTY, Balancer
from meshy.generation.checksum import checksums, combined_checksum, tensor_checksum
from meshy.generation.completion import Completion, GenerationError, check_tokens, sampling_fields
from meshy.generation.transport import message_of
from meshy.recipe import Sampling


def answer(tokens, spans, reason="length", text=""):
    scored = [[-0.5 * token, token, None] for token in tokens]
    meta = {"finish_reason": {"type": reason}, "weight_versions": spans, "output_token_logprobs": scored}
    return {"output_ids": tokens, "text": text, "meta_info": meta}


def span(version, start, end):
    return {"version": version, "start": start, "end": end}


def test_parts_are_joined_with_logprobs_and_versions():
    completion = Completion()
    completion.extend(answer([4, 5, 6], [span("1", 0, 1), span("2", 1, 3)], "abort", "ab"), "http://a")
    completion.extend(answer([], [], "abort"), "http://a")
    completion.extend(answer([7], [span("3", 0, 1)], "stop", "c"), "http://b")
    assert completion == Completion(
        tokens=[4, 5, 6, 7],
        logprobs=[-2.0, -2.5, -3.0, -3.5],
        versions=[1, 2, 2, 3],
        finish_reason="stop",
        text="abc",
        replica="http://b",
        parts=3,
    )


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([], "for 2 tokens"),
        ([span("1", 0, 1)], "for 2 tokens"),
        ([span("1", 0, 1), span("2", 2, 3)], "for 2 tokens"),
        ([span("default", 0, 2)], "'default', which is not a number"),
    ],
)
def test_versions_that_do_not_cover_the_tokens_are_an_error(spans, message):
    with pytest.raises(GenerationError, match=message):
        Completion().extend(answer([4, 5], spans), "http://a")


def test_token_ids_are_checked_before_they_are_sent():
    check_tokens([0, 9], 10)
    for tokens, message in (([], "empty"), ([3, 10], "token id 10"), ([-1], "token id -1")):
        with pytest.raises(GenerationError, match=message):
            check_tokens(tokens, 10)


def test_sampling_in_the_servers_words():
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, stop=("x",), stop_token_ids=(3,))
    assert sampling_fields(sampling, 12, 99) == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "max_new_tokens": 12,
        "stop": ["x"],
        "stop_token_ids": [3],
        "sampling_seed": 99,
    }
    assert sampling_fields(Sampling(), 12, None).keys() == {"temperature", "top_p", "top_k", "min_p", "max_new_tokens"}


def test_the_least_loaded_replica_is_chosen():
    balance = Balancer(["a", "b", "c"])
    assert [balance.acquire() for _ in range(4)] == ["a", "b", "c", "a"]
    balance.release("b")
    assert balance.acquire() == "b" and balance.load == {"a": 2, "b": 1, "c": 1}


def test_requests_of_one_key_stay_together_as_long_as_one_is_under_way():
    balance = Balancer(["a", "b"])
    first = balance.acquire("group 1")
    other = balance.acquire("group 2")
    assert {balance.acquire("group 1") for _ in range(5)} == {first} != {other}
    for _ in range(6):
        balance.release(first, "group 1")
    assert balance.load == {"a": 0, "b": 1}
    assert balance.acquire("group 1") == "a"


def test_a_failed_replica_is_avoided_for_a_while():
    now = [100.0]
    balance = Balancer(["a", "b"], clock=lambda: now[0])
    assert balance.acquire("k") == "a"
    balance.failed("a")
    assert [balance.acquire(), balance.acquire(), balance.acquire("k")] == ["b"] * 3
    balance.failed("b")
    assert balance.acquire() == "a"  # with none left, the least loaded
    now[0] += FAILURE_PENALTY + 1
    assert balance.acquire() == "a"


def test_checksums_are_of_values_and_not_of_layout():
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    expected = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]
    assert tensor_checksum(tensor) == tensor_checksum(tensor.t().contiguous().t()) == expected
    assert tensor_checksum(torch.nn.Parameter(tensor)) == expected != tensor_checksum(tensor + 1)
    assert tensor_checksum(torch.ones(16)) == "9628e545ed3ac074"  # as SGLang reports it
    assert tensor_checksum(tensor.bfloat16()) and tensor_checksum(torch.tensor(3.0))
    sums = checksums([("b", tensor), ("a", tensor + 1)])
    assert combined_checksum(sums) == combined_checksum(dict(reversed(sums.items())))


def test_error_messages_in_all_of_the_servers_shapes():
    assert message_of({"error": {"message": "m"}}) == message_of({"message": "m"}) == message_of({"detail": "m"}) == "m"
    assert message_of(" Flush cache failed.\n") == "Flush cache failed."
