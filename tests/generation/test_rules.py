"""The client's rules, without I/O."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from meshy.generation.balance import KEYS_REMEMBERED, Balancer
from meshy.generation.candidates import Candidates, spread
from meshy.generation.checksum import checksums, combined_checksum, tensor_checksum
from meshy.generation.completion import (
    Completion,
    GenerationError,
    check_candidates,
    check_tokens,
    read_answer,
    sampling_fields,
    weight_version_of,
)
from meshy.generation.transport import message_of
from meshy.recipe import Sampling


def answer(tokens, spans, reason="length", text=""):
    scored = [[-0.5 * token, token, None] for token in tokens]
    meta = {"finish_reason": {"type": reason}, "weight_versions": spans, "output_token_logprobs": scored}
    return {"output_ids": tokens, "text": text, "meta_info": meta}


def span(version, start, end):
    return {"version": version, "start": start, "end": end}


def with_logprobs(whole, scored):
    return {**whole, "meta_info": {**whole["meta_info"], "output_token_logprobs": scored}}


def with_candidates(whole, rows):
    return {**whole, "meta_info": {**whole["meta_info"], "output_top_logprobs": rows}}


def test_parts_are_joined_with_logprobs_and_versions():
    completion = Completion()
    for part, url in (
        (answer([4, 5, 6], [span("1", 0, 1), span("2", 1, 3)], "abort", "ab"), "http://a"),
        (answer([], [], "abort"), "http://a"),
        (answer([7], [span("3", 0, 1)], "stop", "c"), "http://b"),
    ):
        completion.append(read_answer(part, url, 9))
    assert completion == Completion(
        tokens=[4, 5, 6, 7],
        logprobs=[-2.0, -2.5, -3.0, -3.5],
        versions=[1, 2, 2, 3],
        finish_reason="stop",
        text="abc",
        replica="http://b",
        parts=3,
    )


def test_parts_are_joined_with_candidates():
    completion = Completion()
    for part in (
        with_candidates(answer([], [], "abort"), [[[-1.0, 9, None], [-2.0, 8, None]]]),  # no token, though a row
        with_candidates(answer([4], [span("1", 0, 1)], "abort"), [[[-0.25, 4, None], [-3.5, 2**31 - 1, None]]]),
        answer([], [], "abort"),
        with_candidates(answer([7], [span("2", 0, 1)]), [[[-0.5, 5, "a"], [-1, 7, "b"]]]),
    ):
        completion.append(read_answer(part, "http://a", 9, candidates=2))
        assert len(completion.candidates) == len(completion.tokens)
    ids, logprobs = completion.candidates.ids, completion.candidates.logprobs
    assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)
    assert ids.tolist() == [[4, 2**31 - 1], [5, 7]] and logprobs.tolist() == [[-0.25, -3.5], [-0.5, -1.0]]
    assert read_answer(answer([4], [span("1", 0, 1)]), "http://a", 9).candidates is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "http://a gave candidates for 0 of 2 tokens"),
        ([[[-1.0, 4, None]] * 2], r"candidates for 1 of 2 tokens \(top_logprobs_num was 2\)"),
        ([[[-1.0, 4, None]] * 2, [[-1.0, 4, None]]], "1 candidates for token 1 of 2"),
        ([[[-1.0, 4, None]] * 2, None], "0 candidates for token 1 of 2"),
        ([[[-1.0, 4, None]] * 2, [[-1.0, 4], [-1.0, 4, None, None]]], r"no \[log-prob, id, text\]"),
        ([[[-1.0, 4, None]] * 2, [[-1.0, 4, None], [None, 5, None]]], "without a log-prob"),
        ([[[-1.0, 4, None]] * 2, [[-1.0, 4, None], [-1.0, 2**31, None]]], "ids are no token ids"),
        ([[[-1.0, 4, None]] * 2, [[-1.0, 4, None], [-1.0, -1, None]]], "ids are no token ids"),
        ([[[-1.0, 4, None]] * 2, [[-1.0, 4, None], [-1.0, 4.5, None]]], "ids are no token ids"),
        ([[[-1.0, 4, None]] * 2, 7], "not SGLang's"),
    ],
)
def test_candidates_that_do_not_fit_the_tokens_are_an_error(rows, message):
    whole = with_candidates(answer([4, 5], [span("1", 0, 2)]), rows)
    with pytest.raises(GenerationError, match=message):
        read_answer(whole, "http://a", 9, candidates=2)


def test_candidates_stand_where_the_policy_wrote_and_zeros_elsewhere():
    found = Candidates(np.array([[3, 1], [2, 5]], dtype=np.int32), np.array([[-1, -2], [-3, -4]], dtype=np.float32))
    everywhere = spread(found, [False, True, False, True])
    assert everywhere.ids.tolist() == [[0, 0], [3, 1], [0, 0], [2, 5]]
    assert everywhere.logprobs.tolist() == [[0, 0], [-1, -2], [0, 0], [-3, -4]]
    assert (everywhere.ids.dtype, everywhere.logprobs.dtype) == (np.int32, np.float32)


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
        read_answer(answer([4, 5], spans), "http://a", 9)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (None, "not SGLang's"),
        ({}, "not SGLang's.*output_ids|not SGLang's.*meta_info"),
        ({**answer([4], [span("1", 0, 1)]), "meta_info": {}}, "http://a gave an answer that is not SGLang's"),
        (answer([4, 5, 6, 7], [span("1", 0, 4)]), "4 tokens, but was asked for 3 at most"),
        (with_logprobs(answer([4, 5], [span("1", 0, 2)]), [[-1.0, 4, None]]), "2 tokens with 1 log-probs"),
        (with_logprobs(answer([4], [span("1", 0, 1)]), [[None, 4, None]]), "no log-prob for token 0 of 1"),
    ],
)
def test_answers_that_do_not_fit_together_are_an_error(broken, message):
    with pytest.raises(GenerationError, match=message):
        read_answer(broken, "http://a", 3)


def test_token_ids_are_checked_before_they_are_sent():
    check_tokens([0, 9], 10)
    for tokens, message in (([], "empty"), ([3, 10], "token id 10"), ([-1], "token id -1")):
        with pytest.raises(GenerationError, match=message):
            check_tokens(tokens, 10)


def test_more_candidates_than_tokens_are_not_asked_for():
    check_candidates(0, 10)
    check_candidates(10, 10)
    with pytest.raises(GenerationError, match="11 candidates for each token were asked for; the vocabulary has 10"):
        check_candidates(11, 10)


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


def test_the_replica_with_the_fewest_tokens_is_chosen_among_those_that_are_fit():
    balance = Balancer(["a", "b", "c"])
    fit = ("a", "b", "c")
    assert [balance.acquire(fit, 10) for _ in range(4)] == ["a", "b", "c", "a"]
    balance.release("b", 10)
    assert balance.acquire(fit, 50) == "b" and balance.load == {"a": 20, "b": 50, "c": 10}
    assert balance.acquire(fit, 1) == "c" and balance.acquire(("a", "b"), 1) == "a"
    assert balance.acquire((), 1) is None


def test_requests_of_one_key_stay_together_also_one_after_the_other():
    balance, fit = Balancer(["a", "b"]), ("a", "b")
    first = balance.acquire(fit, 10, "group 1")
    other = balance.acquire(fit, 10, "group 2")
    assert {balance.acquire(fit, 10, "group 1") for _ in range(5)} == {first} != {other}
    for _ in range(6):
        balance.release(first, 10, "group 1")
    assert balance.acquire(fit, 10, "another") == "a"
    assert balance.acquire(fit, 10, "group 1") == "a"  # the next turn of a conversation
    balance.release("a", 10, "group 1")
    balance.forget_idle()
    assert balance.acquire(fit, 50, "group 3") == "a" and balance.acquire(fit, 10, "group 1") == "b"


def test_the_requests_of_a_key_move_together_when_their_replica_is_out_and_stay():
    balance = Balancer(["a", "b"])
    assert balance.acquire(("a", "b"), 10, "k") == "a" and balance.acquire(("a", "b"), 10, "l") == "b"
    assert balance.acquire(("b",), 10, "k") == "b"
    assert balance.acquire(("a", "b"), 10, "k") == "b" and balance.acquire(("a", "b"), 10, "new") == "a"


def test_a_replica_is_given_no_more_than_its_bound():
    balance, fit = Balancer(["a", "b"], max_in_flight=2), ("a", "b")
    assert [balance.acquire(fit, 1, "k") for _ in range(5)] == ["a", "a", "b", "b", None]
    balance.release("a", 1, "k")
    assert balance.acquire(fit, 1, "other") == "a" and balance.acquire(fit, 1) is None


def test_few_keys_without_requests_are_remembered():
    balance = Balancer(["a"])
    for number in range(KEYS_REMEMBERED + 10):
        balance.release(balance.acquire(("a",), 1, str(number)), 1, str(number))
    assert len(balance._idle) == KEYS_REMEMBERED and not balance._keys


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


@pytest.mark.parametrize("info", [None, "busy", [], {}, {"error": {"message": "no"}}, {"weight_version": "default"}])
def test_whatever_does_not_tell_a_weight_version_is_one_kind_of_error(info):
    assert weight_version_of({"weight_version": "12"}, "http://a") == 12
    with pytest.raises(GenerationError, match="http://a"):
        weight_version_of(info, "http://a")
