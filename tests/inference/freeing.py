"""`python -m tests.inference.freeing RUN_DIR MODEL`: a replica that frees its memory and takes it again, twice.

Prints the PSS of its process, in bytes, as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.inference.models import call
from tests.inference.replica import service_here

BODY = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}}


def pss() -> int:
    return int(psutil.Process().memory_full_info().pss)


def main(run_dir: str, model: str) -> None:
    with service_here(Path(run_dir), Path(model), inference__engine="embedded", inference__threads="1") as service:

        def write() -> list[int]:
            return call(service.context.replica.url, "/generate", BODY)[2]["output_ids"]

        tokens, freed, back = [write()], [], []
        full = pss()
        payloads: tuple[dict[str, Any], ...] = ({}, {"weights": {"version": 1, "folder": model}})
        for payload in payloads:
            service.free_gpu()
            freed.append(pss())
            service.restore_gpu(payload)
            tokens.append(write())
            back.append(pss())
    print(json.dumps({"tokens": tokens, "full": full, "freed": freed, "back": back}))


if __name__ == "__main__":
    main(*sys.argv[1:])
