"""Reading an answer out of a response: cases from the field."""

import asyncio
import threading

import pytest

from meshy.rewards import RewardSample
from meshy.rewards.gsm8k import reward as gsm8k_reward
from meshy.rewards.math import grade, number, reward
from meshy.rewards.pool import RewardPool

TOWER = "5^{(5^{(5^{(5^5)})}-4)}-5"

RIGHT = [
    ("#### 42\n" + " and the reasoning above confirms this." * 12, "42"),
    ("#### 42.", "42"),
    ("#### $1,234", "1234"),
    ("#### 42.0", "42"),
    ("1,234", "1234"),
    ("The answer is 72 clips, altogether.", "72"),
    ("3 boxes of 24 clips give 72 clips. The answer is: $72$", "72"),
    ("So she pays $18 in all.", "18"),
    ("#### -7", "-7"),
    ("#### 72 clips", "72"),
    (r"\boxed{1,000}", "1000"),
    (r"\boxed{1{,}000}", "1000"),
    (r"\boxed{9\,500}", "9500"),
    (r"\boxed{9{,}500}", "9500"),
    (r"\boxed{1{,}000{,}000}", "1000000"),
    (r"\boxed{(1,2)}", "(1, 2)"),
    (r"\boxed{\frac{1}{3}}", r"\frac{1}{3}"),
    (r"\boxed{\frac{1}{3}}", "1/3"),
    (r"\boxed{\dfrac{1}{2}}", "0.5"),
    (r"\boxed{\boxed{3}}", "3"),
    (r"\boxed{C} no, wait, \boxed{E}", "E"),
    (r"\boxed{3} and now \boxed{4", "3"),
    (r"\boxed{\sqrt{2}}", r"\sqrt2"),
    (r"\boxed{72\text{ clips}}", "72"),
    (r"\boxed{50\%}", "50"),
    (r"\boxed{2x + 1}", "1+2x"),
    (r"\boxed{\frac{\sqrt{8}}{2}}", r"\sqrt{2}"),
    ("#### \\frac{1}{2}", r"\frac{1}{2}"),
]
WRONG = [
    (r"\boxed{(1,2)}", "12"),
    (r"\boxed{12}", "(1,2)"),
    (r"\boxed{1,2}", "12"),
    (r"\boxed{42", "42"),
    (r"\boxed{C} no, wait, \boxed{E}", "C"),
    (r"\boxed{}", ""),
    ("", "42"),
    ("#### ", "42"),
    ("####", ""),
    ("#### 421", "42"),
    ("#### 4.2", "42"),
    ("#### 41, not 42", "42"),
    (r"\boxed{3}\n#### 4", "3"),
    (r"\boxed{e}", "E"),
    (r"\boxed{\frac{1}{0}}", "1"),
    (r"\boxed{\frac{}{}}}}{{", "1"),
    (r"\boxed{41 or 42}", "42"),
]


@pytest.mark.parametrize(("response", "gold"), RIGHT)
def test_right_answers(response, gold):
    assert grade(response, gold)


@pytest.mark.parametrize(("response", "gold"), WRONG)
def test_wrong_answers(response, gold):
    assert not grade(response, gold)


def test_numbers_are_exact():
    assert number("0.1") * 3 == number("0.3") and number("1,2") is None and number("12,34") is None
    assert number("9007199254740993") != number("9007199254740992")


def test_an_integer_answer_is_fine():
    sample = RewardSample(prompt=(), response="so\n#### 1,234", answer=1234)
    assert reward(sample) == gsm8k_reward(sample) == 1.0


def test_grading_works_off_the_main_thread():
    graded = []
    thread = threading.Thread(target=lambda: graded.append(grade(r"\boxed{x(x+1)}", "x^2+x")))
    thread.start()
    thread.join(60)
    assert graded == [True]


def test_a_symbolic_comparison_that_never_returns_costs_one_sample():
    def sample(response, answer):
        return RewardSample(prompt=(), response=response, answer=answer)

    async def main():
        async with RewardPool(reward, workers=2, deadline=4.0) as pool:
            right = sample(r"\boxed{7}", "7")
            return await pool.score([right, sample(rf"\boxed{{{TOWER}}}", "x+1"), right, right])

    results = asyncio.run(main())
    assert [result.value for result in results] in ([1.0, None, 1.0, 1.0], [1.0, 0.0, 1.0, 1.0])
    assert results[1].value == 0.0 or results[1].timed_out
