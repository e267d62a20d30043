from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from meshy.inference.embedded.engine import Engine
from meshy.inference.embedded.request import LogprobOptions, Request, SamplingParams
from meshy.inference.embedded.runner import ModelRunner
from tests.inference.models import CONTEXT, SHAPES, build, serve


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each shape, and `other`: other weights for the first shape."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    folders = {shape: build(root / shape, shape) for shape in SHAPES}
    return {**folders, "other": build(root / "other", "qwen3_grouped_untied", seed=1)}


@pytest.fixture(scope="session")
def folder(model_folders: dict[str, Path]) -> Path:
    return model_folders["qwen3_grouped_untied"]


T = TypeVar("T")


class Bench:
    """An engine in this process, driven through its real thread."""

    def __init__(self, folder: Path, slots: int = 8, **options) -> None:
        runner = ModelRunner(folder, device=torch.device("cpu"), dtype=None, slots=slots, context_length=CONTEXT)
        self.busy: list[tuple[float, float]] = []
        self.engine = Engine(
            runner, max_running=slots, deliver=self._deliver, on_busy=lambda *span: self.busy.append(span), **options
        )
        self.ended: dict[str, threading.Event] = {}
        self._trigger: tuple[Request, int, Callable[[Engine], Any]] | None = None
        self.engine.start()

    def _deliver(self, news: list[Request]) -> None:
        for request in news:
            if self._trigger is not None and request is self._trigger[0] and len(request.output) >= self._trigger[1]:
                action, self._trigger = self._trigger[2], None
                self.acted.set_result(action(self.engine))
            if request.finished:
                self.ended[request.rid].set()

    def submit_and(self, requests: list[Request], count: int, action: Callable[[Engine], T]) -> T:
        """Submit, and at the step in which the last one gets its `count`-th token do `action`, whatever the machine's
        speed: it runs on the engine's thread, so its calls take effect before the next step.
        """
        self.acted = Future()
        requests[-1].stream = True
        self._trigger = (requests[-1], count, action)
        self.submit(requests)
        return self.acted.result(60)

    def submit(self, requests: list[Request]) -> list[Request]:
        self.ended.update((request.rid, threading.Event()) for request in requests)
        self.engine.submit(requests)
        return requests

    def wait(self, requests: list[Request]) -> list[Request]:
        for request in requests:
            assert self.ended[request.rid].wait(60), f"{request.rid} did not end"
        return requests

    def run(self, requests: list[Request]) -> list[Request]:
        return self.wait(self.submit(requests))


@pytest.fixture(scope="session")
def shared_bench(folder: Path) -> Iterator[Bench]:
    bench = Bench(folder)
    yield bench
    bench.engine.close()


@pytest.fixture
def new_bench() -> Iterator[Callable[..., Bench]]:
    """Makes engines that end with the test."""
    made: list[Bench] = []

    def make(folder: Path, **options) -> Bench:
        made.append(Bench(folder, **options))
        return made[-1]

    yield make
    for bench in made:
        bench.engine.close()


def request(rid: str, prompt: list[int], count: int, *, seed: int = 0, **sampling) -> Request:
    """A request for exactly `count` tokens, unless `stop_ids` are given."""
    stop_ids = frozenset(sampling.pop("stop_ids", ()))
    options = LogprobOptions(wanted=True, **sampling.pop("logprobs", {}))
    return Request(
        rid=rid,
        prompt=prompt,
        params=SamplingParams(**sampling),
        max_new_tokens=count,
        seed=seed,
        stop_ids=stop_ids,
        logprob_options=options,
    )


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[str]:
    """The URL of a server process, shared: tests leave it unpaused, with the first weights, serving version 0."""
    with serve(folder, "--context-length", str(CONTEXT), "--max-running-requests", "8") as (url, _):
        yield url
