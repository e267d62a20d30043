"""A generative judge: it has another language model say how good each response is."""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from meshy.columns import TRAIN
from meshy.data.prompts import Chat
from meshy.data.task import Example, Task
from meshy.importing import load
from meshy.lifetime import former_lives, own_life
from meshy.observe.jsonl import JsonlWriter
from meshy.queue.client import AsyncQueueClient
from meshy.queue.rows import Rows
from meshy.rewards.sample import RewardSample
from meshy.scoring.judge_config import JudgeConfig
from meshy.scoring.judge_endpoint import JudgeEndpoint, NotJudged, Verdict
from meshy.service import Context, Service
from meshy.service.exits import Unrecoverable
from meshy.service.looped import until_stopped
from meshy.service.tasks import with_task_group

log = logging.getLogger("meshy.scoring")

RECENT = 1024  # verdicts whose seconds are kept


class JudgeFailed(RuntimeError):
    """A response that could not be judged, and no fallback, or too many in a row that needed it."""


class JudgeService(Service):
    """One event loop: a task for every response that is being judged, and one that writes what has been.

    At most `concurrency` rows are in its hands, from being taken until being written. Those that it has when it dies
    are given out again by the queue, so each is judged, if perhaps twice.
    """

    config: JudgeConfig

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.in_hand = self.judged = self.fell_back = 0
        self._fallbacks = 0  # in a row
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._scored: list[tuple[Rows, float]] = []  # and not written yet
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._runner = asyncio.Runner()
        self.endpoint: JudgeEndpoint | None = None
        self.rows: AsyncQueueClient | None = None
        self.lines: JsonlWriter | None = None

    # The life of the service ------------------------------------------------------------------------------------------

    def setup(self) -> None:
        recipe, config = self.recipe, self.config
        task: Task = load(recipe.data)(**{"seed": recipe.seed, **recipe.data_options})
        self.examples: dict[str, Example] = {example.id: example for example in task.train}
        self.chat = Chat(self.context.model_folder)
        urls = [config.url] if config.url is not None else self._urls_of_group()
        key = None if config.api_key_env is None else os.environ[config.api_key_env].strip()
        self.endpoint = JudgeEndpoint(config, urls, load(config.prompt), load(config.parse), key)
        self.lines = JsonlWriter(self._file())
        self._runner.run(self._connect())

    def _urls_of_group(self) -> list[str]:
        assert self.config.group is not None
        return [f"{url}/v1" for url in self.context.topology.urls(self.config.group)]

    def _file(self) -> Any:
        """Every verdict, a line each."""
        index, file = self.context.replica.index, self.context.folder.path / f"{self.context.group.id}.jsonl"
        return file if index == 0 else file.with_suffix(f".{index}.jsonl")

    async def _connect(self) -> None:
        context = self.context
        self.rows = AsyncQueueClient(
            context.endpoints,
            context.topology.contract,
            context.replica.name,
            life=own_life(),
            former=former_lives(),
        )
        await self.rows.connect()

    def run(self) -> None:
        if not self.stopping.is_set():
            self._runner.run(until_stopped(self, with_task_group(self._judge_rows)))

    def close(self) -> None:
        self._runner.run(self._close())
        self._runner.close()
        if self.lines is not None:
            self.lines.close()

    async def _close(self) -> None:
        for part in (self.endpoint, self.rows):
            if part is not None:
                await part.close()

    # The work ---------------------------------------------------------------------------------------------------------

    async def _judge_rows(self, tasks: asyncio.TaskGroup) -> None:
        assert self.rows is not None
        tasks.create_task(self._write_scores(), name="write")
        while True:
            rows = await self.rows.take(TRAIN, at_most=self.config.concurrency - self.in_hand)
            self.in_hand += len(rows)
            data: Mapping[str, Any] = await self.rows.read(rows)
            for i, uid in enumerate(rows.uids):
                columns = {name: values[i] for name, values in data.items()}
                tasks.create_task(self._judge(rows.select([i]), columns), name=f"row {uid}")
            while self.in_hand >= self.config.concurrency:
                self._room.clear()
                await self._room.wait()

    async def _judge(self, rows: Rows, columns: Mapping[str, Any]) -> None:
        (uid,) = rows.uids
        assert self.endpoint is not None
        sample, began = self.sample(uid, columns), time.time()
        try:
            verdict = await self.endpoint.verdict(sample)
        except NotJudged as error:
            score = self._instead(uid, sample, error)
        except Exception as error:
            error.add_note(f"while row {uid} was judged; its sample: {sample.describe()}")
            raise
        else:
            score = verdict.score
            self._told(uid, columns["prompt_id"], verdict)
        self.timeline.record("judge", began, time.time())
        self._scored.append((rows, score))
        self._news.set()

    def sample(self, uid: str, columns: Mapping[str, Any]) -> RewardSample:
        """A row as a reward sees it. columns: its own. Unrecoverable for a prompt that the data do not have."""
        example = self.examples.get(columns["prompt_id"])
        if example is None:
            raise Unrecoverable(
                f"row {uid}: the run's data have no training prompt {columns['prompt_id']!r} here; a data factory must "
                "return the same examples whenever it is called with the same options"
            )
        written = columns["loss_mask"].nonzero()
        start = int(written[0]) if len(written) else len(columns["tokens"])
        return RewardSample(
            prompt=example.messages,
            response=self.chat.decode(columns["tokens"][start:].tolist()),
            answer=example.answer,
            finish_reason=columns["finish_reason"],
            info=example.info,
        )

    def _told(self, uid: str, prompt_id: str, verdict: Verdict) -> None:
        assert self.lines is not None
        self.judged += 1
        self._fallbacks = 0
        self._seconds.append(verdict.seconds)
        self.lines.write(
            {
                "uid": uid,
                "prompt_id": prompt_id,
                "score": verdict.score,
                "verdict": verdict.text,
                "attempts": verdict.attempts,
                "seconds": verdict.seconds,
            }
        )

    def _instead(self, uid: str, sample: RewardSample, error: NotJudged) -> float:
        """The reward of a response that was not judged. Raises JudgeFailed."""
        told = f"row {uid} could not be judged: {error}\n  sample: {sample.describe()}"
        if self.config.fallback is None:
            raise JudgeFailed(f"{told}\nset `fallback` to go on with a reward for such responses") from error
        self._fallbacks += 1
        self.fell_back += 1
        if self._fallbacks > self.config.max_fallbacks:
            raise JudgeFailed(
                f"{told}\nit is number {self._fallbacks} in a row, more than max_fallbacks; is the judge there at all?"
            ) from error
        log.warning("%s\n  its reward is the fallback, %g", told, self.config.fallback)
        return self.config.fallback

    async def _write_scores(self) -> None:
        """Whatever has been judged since the last write goes into its rows at once, for each write costs
        milliseconds."""
        while True:
            await self._news.wait()
            self._news.clear()
            scored, self._scored = self._scored, []
            assert self.rows is not None
            columns = {self.config.column: [score for _, score in scored]}
            await self.rows.write(Rows.concat(rows for rows, _ in scored), columns)
            self.in_hand -= len(scored)
            self._room.set()

    # What others see --------------------------------------------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        about: dict[str, Any] = {
            "doing": f"judging {self.in_hand} rows" if self.in_hand else "waiting for rows",
            "rows": self.judged + self.fell_back,
        }
        if self.state == "ready" and self.endpoint is not None and self.endpoint.trouble:
            about["detail"] = self.endpoint.trouble
        return about

    def metrics(self) -> dict[str, float]:
        """seconds: that a verdict takes, attempts included; the median of the last ones."""
        group = self.context.group.id
        seconds = list(self._seconds)  # a copy: this is another thread than the loop's
        return {
            f"{group}/judged": self.judged,
            f"{group}/retried": 0 if self.endpoint is None else self.endpoint.retried,
            f"{group}/fell_back": self.fell_back,
            f"{group}/in_hand": self.in_hand,
            f"{group}/seconds": statistics.median(seconds) if seconds else 0.0,
        }
