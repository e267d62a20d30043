"""All that a publish touches, as real processes: embedded servers, trainer ranks, and a client that never rests."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshy.generation import Completion, GenerationClient
from meshy.ignitor.ports import PortBlock
from meshy.recipe import Sampling
from meshy.topology import FIRST_BASE_PORT, LAST_BASE_PORT, Topology
from tests.training.publishing_rank import HOST, recipe_of, topology_of

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MESHY_DEVICE": "cpu"}
DEADLINE = 60.0


class Server:
    """An embedded server on a given port."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.process: subprocess.Popen[str] | None = None

    def start(self, folder: Path, version: int) -> None:
        command = [sys.executable, "-m", "meshy.inference.embedded", "--model-path", str(folder), "--threads", "1"]
        command += ["--port", self.url.rpartition(":")[2], "--weight-version", str(version)]
        command += ["--context-length", "128"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=ROOT)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready on"), f"the server said {line!r}"

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait(20)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(20)


class Trainer:
    """The ranks; `order` has rank 0 do something and returns its answer."""

    def __init__(self, folder: Path, ranks: int) -> None:
        command = [sys.executable, "-m", "tests.training.publishing_rank", str(folder)]
        self.log = folder / "trainer.log"
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        with self.log.open("w") as log:
            self.processes = [
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if rank == 0 else log,
                    stderr=log,
                    text=True,
                    cwd=ROOT,
                    env={**ENVIRONMENT, "RANK_OF_STAGE": str(rank)},
                )
                for rank in range(ranks)
            ]
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.processes[0].stdout is not None
        for line in self.processes[0].stdout:
            if line.startswith("{"):
                self._answers.put(line)
        self._answers.put(None)

    def tell(self, do: str, **arguments: Any) -> None:
        pipe = self.processes[0].stdin
        assert pipe is not None
        pipe.write(json.dumps({"do": do, **arguments}) + "\n")
        pipe.flush()

    def answer(self, seconds: float = DEADLINE) -> dict[str, Any]:
        line = self._answers.get(timeout=seconds)
        assert line is not None, f"the trainer has ended:\n{self.log.read_text()[-4000:]}"
        return json.loads(line)

    def order(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.tell(do, **arguments)
        return self.answer()

    def end(self) -> list[int]:
        """Rank 0 has no more orders; the exit codes."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        return [process.wait(30) for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)


@dataclass
class Asked:
    """A request: what was required of it when it was sent, and what came of it."""

    required: int
    published: int
    completion: Completion


@dataclass
class Load:
    """A client in a thread of its own that keeps `in_flight` requests going, of at most so many new tokens each; their
    lengths differ, so that they do not end together."""

    urls: list[str]
    in_flight: int = 8
    tokens: int = 48
    asked: list[Asked] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = False
        self._news = threading.Condition()
        self._required = 0
        self._client: GenerationClient | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run()), daemon=True)
        self._thread.start()

    def require(self, version: int) -> None:
        """What rollout does at a gate."""

        def set_version() -> None:
            assert self._client is not None
            self._client.require(version)
            self._required = version

        self._loop.call_soon_threadsafe(set_version)

    async def _run(self) -> None:
        async with GenerationClient(self.urls, deadline=DEADLINE) as self._client:
            await asyncio.gather(*(self._lane(i) for i in range(self.in_flight)))

    async def _lane(self, lane: int) -> None:
        assert self._client is not None
        chance = random.Random(lane)
        while not self._stop:
            prompt = [chance.randrange(1, 200) for _ in range(chance.randrange(4, 30))]
            required, count = self._required, chance.randrange(self.tokens // 2, self.tokens + 1)
            try:
                done = await self._client.generate(
                    prompt, Sampling(max_new_tokens=count), seed=chance.randrange(1 << 30)
                )
            except Exception as error:  # noqa: BLE001  (whatever it is, the test shows it)
                with self._news:
                    self.failures.append(error)
                    self._news.notify_all()
                return
            with self._news:
                self.asked.append(Asked(required, self._required, done))
                self._news.notify_all()

    def wait_for_answers(self, count: int) -> None:
        """Until so many more requests are answered, or one has failed."""
        with self._news:
            goal = len(self.asked) + count
            assert self._news.wait_for(lambda: len(self.asked) >= goal or self.failures, DEADLINE), "no answers come"

    def stop(self) -> None:
        self._stop = True
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive(), "requests are lost: they do not end"
        self._loop.close()

    def check(self) -> None:
        """No request lost, and each token written by a version that may have written it."""
        assert not self.failures, self.failures
        for asked in self.asked:
            versions = asked.completion.versions
            assert asked.completion.finish_reason in ("length", "stop")
            assert len(versions) == len(asked.completion.tokens) > 0
            assert versions == sorted(versions), f"versions go back: {versions}"
            assert asked.required <= versions[0], f"v{versions[0]} answered, v{asked.required} was served when asked"
            # A replica may serve a version a moment before its gate is told.
            assert versions[-1] <= asked.published + 1, f"v{versions[-1]} was not published yet"


@dataclass
class Stage:
    folder: Path
    topology: Topology
    servers: list[Server]
    trainer: Trainer

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]


@contextmanager
def stage(
    folder: Path, model: Path, *, ranks: int = 2, models: Sequence[Path] = (), ring: int = 0, **options: Any
) -> Iterator[Stage]:
    """Servers of version 0 (of `models`, or two of `model`) and a trainer that has met them. options: of its config.
    ring: the trainer is in one of so many groups with them; the servers know nothing of it."""
    models = models or (model, model)
    replicas = len(models)
    recipe = recipe_of(str(model), replicas, ranks, options, ring)
    block = PortBlock(HOST)
    bases = iter(random.sample(range(FIRST_BASE_PORT, LAST_BASE_PORT, 2048), 10))
    base_port = next(base for base in bases if not block.claim(topology_of(recipe, base).ports_on(HOST)))
    topology = topology_of(recipe, base_port)
    folder.mkdir(parents=True, exist_ok=True)
    setup = {"model": str(model), "replicas": replicas, "ranks": ranks, "options": options, "base_port": base_port}
    setup["ring"] = ring
    (folder / "stage.json").write_text(json.dumps(setup))
    servers = [Server(url) for url in topology.urls("inference")]
    trainer: Trainer | None = None
    try:
        for server, served in zip(servers, models, strict=True):
            server.start(served, 0)
        trainer = Trainer(folder, ranks)  # it waits for them no longer than its weights_deadline
        assert trainer.answer(2 * DEADLINE) == {"behind": []}
        yield Stage(folder, topology, servers, trainer)
    finally:
        if trainer is not None:
            trainer.kill()
        for server in servers:
            server.end()
        block.release()
