"""A judge: a language model that is asked, over an OpenAI-style endpoint, how good each response is."""

from __future__ import annotations

import asyncio
import math
import os
import time
from typing import Any

from meshy.columns import TRAIN
from meshy.data.prompts import Chat
from meshy.data.task import Example, Task
from meshy.generation.transport import Refused, Transport, Unavailable
from meshy.importing import load
from meshy.lifetime import former_lives, own_life
from meshy.queue.client import AsyncQueueClient
from meshy.queue.errors import StaleRows
from meshy.queue.rows import Rows
from meshy.rewards.sample import RewardSample
from meshy.scoring.judge_config import JudgeConfig
from meshy.service import Context, Service
from meshy.service.looped import until_stopped
from meshy.service.tasks import with_task_group

AGAIN = (408, 409, 425, 429)  # refusals that another try may not meet
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds between two tries; each is twice the one before
SHOWN = 200  # characters of a reply that a message shows


class JudgeError(RuntimeError):
    """A response that could not be judged; the message names it, and says what was tried and what came."""


class JudgeService(Service):
    """One event loop: a task for every response that is being judged."""

    config: JudgeConfig

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.judged = self.retries = self.fell_back = 0
        self.seconds = 0.0  # of replies, added up
        self.in_hand = 0
        self._free = asyncio.Semaphore(self.config.concurrency)
        self._runner = asyncio.Runner()

    def setup(self) -> None:
        config, recipe = self.config, self.recipe
        task: Task = load(recipe.data)(**{"seed": recipe.seed, **recipe.data_options})
        self.examples: dict[str, Example] = {example.id: example for example in task.train}
        self.chat = Chat(self.context.model_folder)
        self.prompt, self.parse = load(config.prompt), load(config.parse)
        urls = [config.url] if config.url else [f"{url}/v1" for url in self.context.topology.urls(config.group or "")]
        self.urls = [f"{str(url).rstrip('/')}/chat/completions" for url in urls]
        key = os.environ.get(config.api_key_env) if config.api_key_env else None
        self.http = Transport({"authorization": f"Bearer {key}"} if key else {})

    def run(self) -> None:
        if not self.stopping.is_set():
            self._runner.run(until_stopped(self, self._work()))

    def close(self) -> None:
        self._runner.close()

    async def _work(self) -> None:
        context = self.context
        client = AsyncQueueClient(
            context.endpoints,
            context.topology.contract,
            context.replica.name,
            life=own_life(),
            former=former_lives(),
        )
        async with client:
            try:
                await with_task_group(lambda tasks: self._take(client, tasks))
            finally:
                await self.http.close()

    async def _take(self, client: AsyncQueueClient, tasks: asyncio.TaskGroup) -> None:
        """Rows as they come, each as soon as there is a place for it."""
        while True:
            await self._free.acquire()
            rows = await client.take(TRAIN, at_most=1)
            self.in_hand += 1
            tasks.create_task(self._judge(client, rows), name=f"judge {rows.uids[0]}")

    async def _judge(self, client: AsyncQueueClient, rows: Rows) -> None:
        try:
            sample = await self._sample(client, rows)
            score = await self._score(rows.uids[0], sample)
            await client.write(rows, {self.config.column: [score]})
            self.judged += 1
        except StaleRows as stale:
            self.log.info("%s", stale)  # another life of this service had judged it
        finally:
            self.in_hand -= 1
            self._free.release()

    async def _sample(self, client: AsyncQueueClient, rows: Rows) -> RewardSample:
        """The response, as a reward would be given it."""
        data: dict[str, Any] = await client.read(rows)
        id = data["prompt_id"][0]
        if id not in self.examples:
            raise JudgeError(f"row {rows.uids[0]}: the data have no training prompt {id!r}; are they the same here?")
        example, tokens = self.examples[id], data["tokens"][0][data["loss_mask"][0]]
        return RewardSample(
            prompt=example.messages,
            response=self.chat.decode(tokens.tolist()),
            answer=example.answer,
            finish_reason=data["finish_reason"][0],
            info=example.info,
        )

    async def _score(self, uid: str, sample: RewardSample) -> float:
        """What the judge says, after as many tries as it takes and the recipe allows."""
        config = self.config
        body = {
            "model": config.model,
            "messages": list(self.prompt(sample)),
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
        }
        trouble, attempt = "nothing was tried", 0
        for attempt in range(1, config.attempts + 1):
            if attempt > 1:
                self.retries += 1
                await asyncio.sleep(min(LONGEST_WAIT, FIRST_WAIT * 2 ** (attempt - 2)))
            url = self.urls[(self.judged + attempt) % len(self.urls)]
            began = time.monotonic()
            try:
                answer = await self.http.request("POST", url, body, config.request_deadline)
                return self._read(answer, sample)
            except Refused as error:
                trouble = str(error)
                if error.status not in AGAIN:
                    break
            except (Unavailable, ValueError) as error:
                trouble = str(error)
            finally:
                self.seconds += time.monotonic() - began
        told = f"row {uid} could not be judged after {attempt} of {config.attempts} attempts: {trouble}"
        if config.fallback is None:
            raise JudgeError(f"{told}. Set fallback to the score that such responses are to get, or mend the endpoint")
        self.fell_back += 1
        self.log.warning("%s; it gets %g", told, config.fallback)
        return config.fallback

    def _read(self, answer: Any, sample: RewardSample) -> float:
        """ValueError where the reply cannot be read."""
        try:
            text = answer["choices"][0]["message"]["content"]
        except (TypeError, KeyError, IndexError) as error:
            raise ValueError(f"the answer is no chat completion: {str(answer)[:SHOWN]!r}") from error
        try:
            score = float(self.parse(text or "", sample))
        except (ValueError, TypeError) as error:
            raise ValueError(f"the reply cannot be read ({error}): {str(text)[-SHOWN:]!r}") from error
        if not math.isfinite(score):
            raise ValueError(f"the reply was read as {score}: {str(text)[-SHOWN:]!r}")
        return score

    def health(self) -> dict[str, Any]:
        doing = f"judging {self.in_hand} responses" if self.in_hand else "waiting for rows"
        return {"doing": doing, "judged": self.judged, "retries": self.retries, "fell_back": self.fell_back}

    def metrics(self) -> dict[str, float]:
        group = self.context.group.id
        return {
            f"{group}/judged": self.judged,
            f"{group}/retries": self.retries,
            f"{group}/fell_back": self.fell_back,
            f"{group}/reply_seconds": self.seconds / max(1, self.judged),
        }
