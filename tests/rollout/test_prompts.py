"""Chat template and tokenizer, with the demo model's own."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from meshy.data.prompts import Chat, PromptError, PromptTokens, longest
from tests.rollout.roles import MODEL, example


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(Path(MODEL))


def test_ids_are_those_of_the_models_own_template(chat):
    messages = ({"role": "system", "content": "Add."}, {"role": "user", "content": "12+7 <|end|>"})
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    expected = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)["input_ids"]
    assert chat.encode(example("a", "", messages=messages)) == expected


def test_options_reach_the_template(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_text((Path(MODEL) / name).read_text())
    (tmp_path / "chat_template.jinja").write_text("{% if thinking %}yes{% else %}no{% endif %}")
    for options, text in (({"thinking": True}, "yes"), (None, "no")):
        chat = Chat(tmp_path, options)
        assert chat.decode(chat.encode(example("a", ""))) == text


def test_a_prompt_that_the_template_refuses_is_named(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_text((Path(MODEL) / name).read_text())
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('unknown role') }}")
    with pytest.raises(PromptError, match="prompt 'a': unknown role"):
        Chat(tmp_path).encode(example("a", "x"))
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(PromptError, match=r"has no chat template; add a chat_template\.jinja"):
        Chat(tmp_path)


def test_special_tokens_are_left_out_of_a_responses_text(chat):
    end = 1
    ids = [*chat.encode(example("a", "5+5")), end]
    assert chat.decode(ids) == "5+5"
    assert chat.vocab_size == 264


def test_a_prompt_must_leave_room_for_a_response(chat):
    examples = [example("short", "1"), example("long", "1" * 30), example("middle", "1" * 10)]
    tokens = len(chat.encode(examples[1]))
    assert longest(examples, 2) == [1, 2]
    PromptTokens(chat, examples, limit=tokens).check_longest()
    prompts = PromptTokens(chat, examples, limit=tokens - 1)
    assert prompts[0] is prompts[0]  # worked out once
    with pytest.raises(PromptError, match=f"prompt 'long' has {tokens} tokens; .* leaves room for 1 to {tokens - 1}"):
        prompts.check_longest(count=1)
