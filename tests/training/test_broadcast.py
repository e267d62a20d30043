"""Replicas that hang or refuse in the middle of a broadcast: the others get their weights all the same."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshy.training.weights.collective import Collective
from meshy.training.weights.publisher import Published, Publisher
from tests.inference.models import serve

pytestmark = pytest.mark.e2e

DEADLINE = 4.0
MODEL = Path(__file__).parents[2] / "recipes" / "demo_model"  # too large for the buffers of a connection
Server = tuple[str, subprocess.Popen[str]]


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serve(MODEL)) for _ in range(3)]


class Trainer:
    """Publishes by broadcast. before: called before the middle tensor is sent."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self.publisher = Publisher(urls, deadline=DEADLINE)
        self.publisher.start(30)
        self.publisher.carrier = Collective("127.0.0.1", 0, dict.fromkeys(urls, 1), 1 << 20, torch.device("cpu"))
        self.weights = load_file(MODEL / "model.safetensors")

    def publish(self, version: int, before: Callable[[], None] = lambda: None) -> Published:
        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for number, (name, tensor) in enumerate(self.weights.items()):
                if number == len(self.weights) // 2:
                    before()
                yield name, tensor + version

        return self.publisher.stream(version, self.urls, tensors(), torch.float32)

    def agree(self) -> bool:
        """Whether all replicas hold the same weights."""
        sums = self.publisher.checksums(self.urls)
        return len(sums) == len(self.urls) and len({str(ranks) for ranks in sums.values()}) == 1


@pytest.mark.prove
def test_one_that_hangs_does_not_hold_up_the_others(servers: list[Server]) -> None:
    urls = [url for url, _ in servers]
    trainer = Trainer(urls)
    assert all(len(trainer.publish(version).served) == 3 for version in (1, 2))
    _, victim = servers[1]
    told = trainer.publish(3, lambda: victim.send_signal(signal.SIGSTOP))
    assert sorted(told.served) == sorted([urls[0], urls[2]]) and list(told.behind) == [urls[1]]
    trainer.urls = [urls[0], urls[2]]
    for version in (4, 5):
        assert len(trainer.publish(version).served) == 2
    victim.send_signal(signal.SIGCONT)
    trainer.urls = urls
    assert len(trainer.publish(6).served) == 3 and trainer.agree()
    trainer.publisher.close()
