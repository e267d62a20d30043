"""The demo's task."""

import pytest

from meshy.data.addition import addition, is_held_out
from meshy.rewards import RewardSample
from meshy.rewards.addition import reward


def pair(example):
    return tuple(map(int, example.messages[0]["content"].split("+")))


def test_evaluation_pairs_are_never_trained_on_in_either_order():
    task = addition(seed=1)
    train = {frozenset(pair(example)) for example in task.train}
    assert len(task.evaluation) == 256
    assert all(frozenset(pair(example)) not in train for example in task.evaluation)
    assert all(is_held_out(*pair(example)) and is_held_out(*pair(example)[::-1]) for example in task.evaluation)


def test_answers_are_sums_of_every_length():
    task = addition(max_digits=6)
    assert all(example.answer == str(sum(pair(example))) for example in (*task.train, *task.evaluation))
    assert {example.info["digits"] for example in task.evaluation} == set(range(1, 7))


def test_the_seed_draws_the_training_prompts_only():
    one, again, other = addition(seed=1), addition(seed=1), addition(seed=2)
    assert one == again and one.train != other.train and one.evaluation == other.evaluation


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("7+5=12 4+8+1=13 3+0+1=4 #432", 1.0),
        ("#432", 1.0),
        ("#43 no, #432", 1.0),
        ("#432 or #43", 0.0),
        ("#4321", 0.0),
        ("#0432", 0.0),
        ("432", 0.0),
        ("#", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_reads_the_number_behind_the_last_hash(response, score):
    sample = RewardSample(prompt=({"role": "user", "content": "347+85"},), response=response, answer="432")
    assert reward(sample) == score


def test_numbers_without_digits_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        addition(max_digits=0)
