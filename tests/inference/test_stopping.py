"""Stop strings and stop ids end a response where they should, and the text shows what it should."""

from __future__ import annotations

import pytest

from meshy.inference.embedded.protocol import Limits, RequestFactory, answer
from meshy.inference.embedded.request import RequestError
from meshy.inference.embedded.text import Text, end_tokens
from tests.inference.models import CONTEXT, VOCAB


@pytest.fixture(scope="module")
def factory(folder):
    text = Text(folder)
    return RequestFactory(text, Limits(VOCAB, CONTEXT, end_tokens(folder, None, text.tokenizer)))


def written(factory, word: str, **sampling):
    """A request whose model writes `word`, byte by byte, until it is stopped."""
    (one,), _ = factory.generate({"input_ids": [1], "sampling_params": sampling, "return_logprob": True})
    for token in factory.text.encode(word):
        one.append(token, -0.5, "0")
        if one.finished:
            break
    return one


def test_a_stop_string_over_several_tokens(factory):
    one = written(factory, "answer: 42 END and more", stop=["END", "nothing"])
    assert one.finish_reason == {"type": "stop", "matched": "END"}
    shown = answer(one, factory.text)
    assert shown["text"] == "answer: 42 " and len(shown["output_ids"]) == len("answer: 42 END")
    assert len(shown["meta_info"]["output_token_logprobs"]) == len(shown["output_ids"])


def test_a_stop_string_kept_on_request(factory):
    one = written(factory, "a END", stop="END", no_stop_trim=True)
    assert answer(one, factory.text)["text"] == "a END"


def test_a_stop_string_of_characters_of_several_bytes(factory):
    one = written(factory, "naïve → done 日本 after", stop=["→ done 日本"])
    assert one.finish_reason["matched"] == "→ done 日本" and answer(one, factory.text)["text"] == "naïve "


def test_half_a_character_is_not_shown_while_more_may_come(factory):
    one = written(factory, "a日", max_new_tokens=99)
    assert answer(one, factory.text)["text"] == "a日"
    assert answer(one, factory.text, count=2)["text"] == "a"


def test_stop_ids_and_the_end_token(factory):
    end = factory.text.tokenizer.eos_token_id
    (token,) = factory.text.encode("X")
    one = written(factory, "abXcd", stop_token_ids=[token])
    assert one.finish_reason == {"type": "stop", "matched": token}
    assert answer(one, factory.text)["text"] == "ab" and one.output[-1] == token
    (two,), _ = factory.generate({"input_ids": [1]})
    two.append(end, -0.5, "0")
    assert two.finish_reason == {"type": "stop", "matched": end}
    (three,), _ = factory.generate({"input_ids": [1], "sampling_params": {"ignore_eos": True}})
    three.append(end, -0.5, "0")
    assert not three.finished


def test_the_end_token_as_the_last_allowed_token_counts_as_stop(factory):
    end = factory.text.tokenizer.eos_token_id
    (one,), _ = factory.generate({"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})
    one.append(end, -0.5, "0")
    assert one.finish_reason["type"] == "stop"


def test_without_a_tokenizer_texts_are_refused_and_ids_served(tmp_path):
    factory = RequestFactory(Text(tmp_path), Limits(VOCAB, CONTEXT, frozenset()))
    with pytest.raises(RequestError, match="no tokenizer"):
        factory.generate({"text": "hi"})
    with pytest.raises(RequestError, match="stop_token_ids"):
        factory.generate({"input_ids": [1], "sampling_params": {"stop": ["x"]}})
    (one,), batched = factory.generate({"input_ids": [1, 2]})
    one.append(5, -1.0, "0")
    assert not batched and answer(one, factory.text)["text"] == ""


def test_unseeded_requests_repeat_only_where_that_is_asked_for(folder):
    text = Text(folder)
    limits = Limits(VOCAB, CONTEXT, frozenset())

    def seeds(random_seed):
        made = RequestFactory(text, limits, random_seed)
        return [one.seed for _ in range(5) for one in made.generate({"input_ids": [1]})[0]]

    assert seeds(3) == seeds(3) != seeds(4)
    assert len(set(seeds(3))) == 5
    assert seeds(None) != seeds(None)
