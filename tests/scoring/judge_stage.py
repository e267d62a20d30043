"""A judge as an ignitor starts it, over a real queue, with nobody else: a test plays rollout and the trainer."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshy.data.addition import addition
from meshy.data.prompts import Chat, load_tokenizer
from meshy.ignitor.ports import PortBlock
from meshy.lifetime import FORMER_LIVES, LIFE
from meshy.observe.jsonl import read_jsonl
from meshy.observe.runfolder import RunFolder
from meshy.queue.sync import QueueClient
from meshy.service.context import Launch, queue_endpoints, run_digest
from meshy.service.readiness import is_ready
from meshy.settings import resolve
from meshy.topology import FIRST_BASE_PORT, LAST_BASE_PORT, Gpu, Topology
from tests.launch import ROOT
from tests.rollout.play import HOST, RUN_ID, queue_processes

RECIPE = str(Path(__file__).with_name("judged_rows.py"))
DEMO = ROOT / "recipes" / "demo_model"
GPUS = (Gpu(0, HOST, 0, "cpu"),)
KEY = "sk-very-secret"
NAME = "judge.0"
DEADLINE = 40.0


@dataclass
class JudgeProcess:
    folder: RunFolder
    topology: Topology
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        return self.folder.log(NAME).read_text(errors="replace")

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        return read_jsonl(self.folder.path / "judge.jsonl")

    def wait_ready(self) -> None:
        leader = self.topology.replica(NAME).leader
        end = time.monotonic() + DEADLINE
        while not is_ready(leader, RUN_ID):
            assert self.process.poll() is None and time.monotonic() < end, self.log
            time.sleep(0.05)

    def ask(self, path: str) -> str:
        leader = self.topology.replica(NAME).leader
        with urllib.request.urlopen(f"http://{leader.host}:{leader.admin_port}{path}", timeout=10) as answer:
            return answer.read().decode()

    def health(self) -> dict[str, Any]:
        return json.loads(self.ask("/health"))

    def metrics(self) -> dict[str, float]:
        lines = [line.rsplit(" ", 1) for line in self.ask("/metrics").splitlines()]
        return {name.partition("{")[0].removeprefix("meshy_judge_"): float(value) for name, value in lines}

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class JudgeStage:
    """topology: of the queue. The rows are answers to the run's own first prompts."""

    def __init__(self, topology: Topology, writer: QueueClient, reader: QueueClient) -> None:
        self.topology, self.writer, self.reader = topology, writer, reader
        self.examples, self.chat, self.tokenizer = addition().train, Chat(DEMO), load_tokenizer(DEMO)
        self._rows = 0
        self._lives: list[str] = []

    def put(self, responses: Sequence[str], **columns: Sequence[Any]) -> dict[str, str]:
        """A row for each, as the next prompts' answers: {uid: what the judge will be asked}. columns: others than would
        be right."""
        rows: dict[str, list[Any]] = {"uid": [], "tokens": [], "loss_mask": [], "prompt_id": [], "finish_reason": []}
        asked = {}
        for response in responses:
            example = self.examples[self._rows]
            prompt, written = self.chat.encode(example), self._encode(f"{response}<|end|>")
            rows["uid"].append(str(self._rows))
            rows["tokens"].append([*prompt, *written])
            rows["loss_mask"].append([False] * len(prompt) + [True] * len(written))
            rows["prompt_id"].append(example.id)
            rows["finish_reason"].append("stop")
            asked[str(self._rows)] = f"{example.messages[0]['content']} {response} {example.answer} stop"
            self._rows += 1
        self.writer.put("train", {**rows, **columns})
        return asked

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def read(self, count: int) -> dict[str, float]:
        """The scores of so many rows, by uid; they are cleared."""
        rows = self.reader.take("train", at_least=count, at_most=count, timeout=DEADLINE)
        data: Any = self.reader.read(rows)
        self.reader.clear(rows)
        return dict(zip(data["uid"], data["judge_reward"].tolist(), strict=True))

    @contextmanager
    def judge(self, run_dir: Path, url: str, **fields: str) -> Iterator[JudgeProcess]:
        """The next life of the judge. fields: of its configuration, as on a command line."""
        settings = {"url": url, **{f"judge.{name}": value for name, value in fields.items()}}
        recipe, topology = resolve(RECIPE, settings, GPUS, self.topology.base_port)
        folder = RunFolder(run_dir).make()
        launch = Launch(
            run_id=RUN_ID,
            run_dir=str(folder.path),
            recipe_file=RECIPE,
            settings=settings,
            gpus=GPUS,
            base_port=topology.base_port,
            digest=run_digest(recipe, topology),
            model_folder=str(DEMO),
        )
        launch.write(folder.path / "launch.json")
        environment: Mapping[str, str] = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "TESTS_OF_JUDGE_KEY": f"{KEY}\n",
            LIFE: f"life{len(self._lives)}",
            FORMER_LIVES: ",".join(self._lives),
        }
        self._lives.append(environment[LIFE])
        with folder.log(NAME).open("ab") as log:
            command = [sys.executable, "-m", "meshy.service", str(folder.path / "launch.json"), NAME]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
        judge = JudgeProcess(folder, topology, process)
        try:
            yield judge
        finally:
            judge.kill()


@contextmanager
def judge_stage(folder: Path) -> Iterator[JudgeStage]:
    block = PortBlock(HOST)
    bases = random.sample(range(FIRST_BASE_PORT, LAST_BASE_PORT, 2048), 10)
    topologies = (resolve(RECIPE, {"url": "http://nobody"}, GPUS, base)[1] for base in bases)
    topology = next(one for one in topologies if not block.claim(one.ports_on(HOST)))
    endpoints = queue_endpoints(topology, RUN_ID)
    try:
        with (
            queue_processes(topology, folder),
            QueueClient(endpoints, topology.contract, "writer.0") as writer,
            QueueClient(endpoints, topology.contract, "reader.0") as reader,
        ):
            yield JudgeStage(topology, writer, reader)
    finally:
        block.release()
