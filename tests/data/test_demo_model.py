"""The demo's models: their tokenizer, the demonstrations that they were made from, and what their makers do."""

import filecmp
import random
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from meshy.data.addition import addition, draw_pair, is_held_out
from meshy.models import folder_faults
from meshy.rewards import RewardSample
from meshy.rewards.addition import reward
from scripts.demo_models.answers import careful, careless, is_right, right, wrong
from scripts.demo_models.reward_model import make_reward_model
from scripts.demo_models.teacher import make_teacher
from scripts.demo_models.tokenizer import make_tokenizer

ROOT = Path(__file__).parents[2]
CONTEXT_LENGTH = 128


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "recipes" / "demo_model")


def correct(a, b, response):
    return reward(RewardSample(prompt=(), response=response, answer=str(a + b)))


def test_any_text_survives_the_tokenizer(tokenizer):
    for text in ("7+5=12 #432", "a\tb\n  c ", "Grüße, 你好 🙂", "it 's , done ."):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_tokenizer_is_the_one_that_the_script_makes(tokenizer):
    made = make_tokenizer()
    assert made.get_vocab() == tokenizer.get_vocab() and made.chat_template == tokenizer.chat_template
    config = AutoConfig.from_pretrained(ROOT / "recipes" / "demo_model")
    assert config.vocab_size == len(tokenizer) == 264
    assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_the_chat_template_marks_every_turn(tokenizer):
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+2"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|system|>add<|end|><|user|>1+2<|end|><|assistant|>"
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(prompt)[-2:]) == ["<|end|>", "<|assistant|>"]


def test_careful_demonstrations_are_right_held_in_and_fit_the_context(tokenizer):
    rng = random.Random(0)
    for _ in range(300):
        a, b = draw_pair(rng, 6, held_out=False)
        response = careful(a, b, rng)
        assert correct(a, b, response) == 1.0 and not is_held_out(a, b)
        prompt = f"<|user|>{a}+{b}<|end|><|assistant|>"
        assert len(tokenizer.encode(prompt + response)) < CONTEXT_LENGTH
    assert careful(347, 85, rng) == "7+5=12 4+8+1=13 3+0+1=4 #432"


def test_careless_demonstrations_blurt_long_sums_out_and_lose_carries():
    rng = random.Random(0)
    pairs = [draw_pair(rng, 5, held_out=False) for _ in range(2000)]
    responses = [careless(a, b, rng) for a, b in pairs]
    blurted = [response.startswith("#") for response in responses]
    long = [blunt for (a, b), blunt in zip(pairs, blurted, strict=True) if max(a, b) >= 10_000]
    short = [blunt for (a, b), blunt in zip(pairs, blurted, strict=True) if max(a, b) < 10]
    assert 0.5 < sum(long) / len(long) < 0.8 and 0.1 < sum(short) / len(short) < 0.4
    worked = [correct(a, b, r) for (a, b), r in zip(pairs, responses, strict=True) if not r.startswith("#")]
    assert 0.85 < sum(worked) / len(worked) < 0.99


def test_evaluation_prompts_are_short(tokenizer):
    lengths = [
        len(tokenizer.apply_chat_template(list(e.messages), add_generation_prompt=True, return_dict=False))
        for e in addition().evaluation
    ]
    assert max(lengths) == 14


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TEACHER = ROOT / "recipes" / "demo_teacher"


def test_the_teacher_is_whole_and_has_the_students_tokenizer_byte_for_byte():
    assert folder_faults(TEACHER) == []
    same, other, missing = filecmp.cmpfiles(TEACHER, ROOT / "recipes" / "demo_model", TOKENIZER_FILES, shallow=False)
    assert sorted(same) == sorted(TOKENIZER_FILES) and not other and not missing


def test_the_teacher_adds_well(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(TEACHER)
    for example in addition().evaluation[:8]:
        prompt = tokenizer.apply_chat_template(list(example.messages), add_generation_prompt=True, return_tensors="pt")
        ids = prompt["input_ids"] if hasattr(prompt, "keys") else prompt
        answer = tokenizer.decode(model.generate(ids, max_new_tokens=80)[0, ids.shape[1] :], skip_special_tokens=True)
        assert reward(RewardSample(prompt=example.messages, response=answer, answer=example.answer)) == 1.0, answer


def test_answers_to_tell_apart_are_right_and_wrong():
    rng = random.Random(0)
    for _ in range(200):
        a, b = draw_pair(rng, 5, held_out=False)
        assert is_right(a, b, right(a, b, rng))
        assert not is_right(a, b, wrong(a, b, rng)[0])


@pytest.mark.prove
def test_a_teacher_and_a_reward_model_are_made(tmp_path):
    make_teacher(tmp_path / "teacher", steps=2, size=4)
    assert folder_faults(tmp_path / "teacher") == []
    make_reward_model(tmp_path / "reward", steps=2, size=4)
    assert folder_faults(tmp_path / "reward") == []
    assert AutoConfig.from_pretrained(tmp_path / "reward").num_labels == 1
