"""Rewards that misbehave as people's rewards do; the sample's answer says how."""

import os
import time
from fractions import Fraction
from pathlib import Path

import numpy

from meshy.rewards import RewardSample

RETURNS = {
    "none": None,
    "nan": float("nan"),
    "inf": float("inf"),
    "text nan": "nan",
    "word": "good",
    "dict": {"score": 1.0},
    "list": [1.0, 0.0],
    "array": numpy.ones(2),
    "complex": 1j,
    "true": True,
    "text": "1.0",
    "numpy": numpy.float32(1.0),
    "numpy 0-d": numpy.array(1),
    "fraction": Fraction(1, 1),
    "int": 1,
}


def by_answer(sample: RewardSample):
    match sample.answer:
        case "loop":
            while True:
                pass
        case "sleep":
            time.sleep(1e9)
        case "power":
            return 9**9**9
        case "raise":
            raise KeyError("no such verdict")
        case "exit":
            raise SystemExit(3)
        case "die":
            os._exit(3)
        case "child":
            os.system(f"sleep 1000 & echo $! > {sample.info['file']}; sleep 1000")
        case "meet":
            folder = Path(sample.info["folder"])
            (folder / str(os.getpid())).touch()
            while len(list(folder.iterdir())) < sample.info["guests"]:
                time.sleep(0.1)
            return 1.0
        case "pid":
            return os.getpid()
        case answer:
            return RETURNS[answer]


def constant(sample: RewardSample) -> float:
    return 0.0


def torch_free(sample: RewardSample) -> bool:
    import sys

    return "torch" not in sys.modules
