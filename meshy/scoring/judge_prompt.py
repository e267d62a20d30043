"""How a judge is asked, and how its answer is read, unless a recipe says otherwise. Torch-free."""

from __future__ import annotations

import re

from meshy.rewards.sample import RewardSample

BEST = 10
INSTRUCTION = (
    "You grade answers. Read the question and the answer{with_reference}, and end your reply with a line that holds "
    "nothing but the grade: a number from 0 (wrong or useless) to {best} (right and well put)."
)


def grade_prompt(sample: RewardSample) -> list[dict[str, str]]:
    """Chat messages that ask for a grade: the question, the answer, and the reference answer where there is one."""
    question = "\n".join(f"{message['role']}: {message['content']}" for message in sample.prompt)
    parts = [f"Question:\n{question}", f"Answer:\n{sample.response}"]
    known = sample.answer is not None and str(sample.answer) != ""
    if known:
        parts.insert(1, f"Reference answer:\n{sample.answer}")
    told = INSTRUCTION.format(with_reference=" beside the reference answer" if known else "", best=BEST)
    return [{"role": "system", "content": told}, {"role": "user", "content": "\n\n".join(parts)}]


def read_grade(text: str, sample: RewardSample) -> float:
    """The last number of a reply, from 0 to BEST, as a share of it. ValueError where there is none."""
    numbers = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", text)]
    if not numbers or not 0 <= numbers[-1] <= BEST:
        raise ValueError(f"no grade from 0 to {BEST} at its end")
    return numbers[-1] / BEST
