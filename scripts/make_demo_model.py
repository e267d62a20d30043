"""Makes a model of the demo, addition of whole numbers, from a seed; `scripts/demo_models/` says how each is made.

    python scripts/make_demo_model.py student --out recipes/demo_model       adds, but has two bad habits
    python scripts/make_demo_model.py teacher --out recipes/demo_teacher     larger, and has no bad habit
    python scripts/make_demo_model.py reward_model --out FOLDER              tells right answers from wrong ones

All share one tokenizer, and none is shown a pair that is held out for evaluation. One thread; minutes each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.demo_models.reward_model import make_reward_model
from scripts.demo_models.student import make_student
from scripts.demo_models.teacher import make_teacher

MAKERS: dict[str, Callable[..., object]] = {
    "student": make_student,
    "teacher": make_teacher,
    "reward_model": make_reward_model,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MAKERS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="fewer make a worse model sooner")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {} if options.steps is None else {"steps": options.steps}
    MAKERS[options.model](options.out, seed=options.seed, **settings)


if __name__ == "__main__":
    main()
