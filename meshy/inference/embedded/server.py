"""What answers on which path.

Outcomes come from the engine in one bulk per step, through one wake-up of the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from meshy.inference.embedded import information
from meshy.inference.embedded.chat import chat_answer, chat_requests
from meshy.inference.embedded.engine import Engine
from meshy.inference.embedded.http import Answer, Application, Call, Handler, as_json, done, refusal
from meshy.inference.embedded.protocol import RequestFactory, answer
from meshy.inference.embedded.request import Request, RequestError
from meshy.inference.embedded.weight_routes import WeightRoutes

EVENT_STREAM = b"text/event-stream; charset=utf-8"
FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the "
    "operation will not be performed.)\n"
)


@dataclass(eq=False, slots=True)
class Job:
    """The requests of one HTTP call, and the event that tells of their progress."""

    requests: list[Request]
    pending: int
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Server:
    """`app` is the ASGI application; `deliver` is what the engine calls."""

    def __init__(self, engine: Engine, factory: RequestFactory, model_path: Path, arguments: dict[str, Any]) -> None:
        self.engine = engine
        self.factory = factory
        self.weights = WeightRoutes(engine, model_path)
        self.tokenizer_path = str(model_path)
        self.arguments = {**arguments, "tokenizer_path": self.tokenizer_path}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._live: dict[str, Request] = {}
        self.app = Application(self._routes(), bodiless=frozenset({"/flush_cache"}))
        engine.deliver = self.deliver

    def _routes(self) -> dict[tuple[str, str], Handler]:
        return {
            ("GET", "/health"): self._health,
            ("GET", "/health_generate"): self._health,
            ("GET", "/model_info"): self._model_info,
            ("GET", "/get_model_info"): self._model_info,
            ("GET", "/server_info"): self._server_info,
            ("GET", "/get_server_info"): self._server_info,
            ("GET", "/v1/loads"): self._loads,
            ("GET", "/v1/models"): self._models,
            ("GET", "/flush_cache"): self._flush,
            ("POST", "/flush_cache"): self._flush,
            ("POST", "/generate"): self._generate,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/abort_request"): self._abort,
            ("POST", "/pause_generation"): self._pause,
            ("POST", "/continue_generation"): self._continue,
            **self.weights.routes(),
        }

    # Generation -------------------------------------------------------------------------------------------------------

    def deliver(self, news: list[Request]) -> None:
        """On the engine's thread: hand a step's news to the event loop in one go."""
        if self._loop is None or self._loop.is_closed():
            return  # no reader has come yet, or none is left
        try:
            self._loop.call_soon_threadsafe(self._take_news, news)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _take_news(self, news: list[Request]) -> None:
        for request in news:
            job: Job = request.sink
            if request.finished and self._live.pop(request.rid, None) is not None:
                job.pending -= 1
            if not job.pending or request.stream:
                job.news.set()

    def _submit(self, requests: list[Request]) -> Job:
        self._loop = asyncio.get_running_loop()
        job = Job(requests, len(requests))
        rids = {request.rid for request in requests}
        if len(rids) < len(requests) or not rids.isdisjoint(self._live):
            raise RequestError(f"Duplicate request ID detected: {sorted(rids & self._live.keys()) or sorted(rids)}")
        for request in requests:
            request.sink = job
        self.engine.submit(requests)
        self._live.update((request.rid, request) for request in requests)
        return job

    async def _finished(self, job: Job, call: Call) -> None:
        """Until all requests of the job have ended; a client that goes away ends them."""
        watch = asyncio.create_task(self._abort_when_gone(job, call))
        try:
            while job.pending:
                await job.news.wait()
                job.news.clear()
        finally:
            watch.cancel()

    async def _abort_when_gone(self, job: Job, call: Call) -> None:
        await call.gone()
        self.engine.abort({request.rid for request in job.requests})

    async def _generate(self, call: Call) -> Answer:
        requests, batched = self.factory.generate(call.body)
        job = self._submit(requests)
        if requests[0].stream:
            return Answer(content_type=EVENT_STREAM, stream=self._events(job, batched, call))
        await self._finished(job, call)
        if (failure := failure_of(requests)) is not None:
            return failure
        answers = [answer(request, self.factory.text) for request in requests]
        return as_json(answers if batched else answers[0])

    async def _events(self, job: Job, batched: bool, call: Call) -> AsyncIterator[bytes]:
        """Server-sent events, each with all that has been written so far."""
        watch = asyncio.create_task(self._abort_when_gone(job, call))
        sent = dict.fromkeys(range(len(job.requests)), 0)
        try:
            while sent:
                await job.news.wait()
                job.news.clear()
                for index in list(sent):
                    request = job.requests[index]
                    ended, count = request.finished, len(request.output)
                    if not ended and count == sent[index]:
                        continue
                    sent[index] = count
                    event = answer(request, self.factory.text, None if ended else count)
                    if ended:
                        del sent[index]
                    yield b"data: " + orjson.dumps({**event, "index": index} if batched else event) + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            watch.cancel()

    async def _chat(self, call: Call) -> Answer:
        requests = chat_requests(call.body, self.factory)
        await self._finished(self._submit(requests), call)
        return failure_of(requests) or as_json(chat_answer(call.body, requests, self.factory.text))

    async def _abort(self, call: Call) -> Answer:
        await done(self.engine.abort(None if call.body.get("abort_all") else {str(call.body.get("rid", ""))}))
        return Answer()

    # Control ----------------------------------------------------------------------------------------------------------

    async def _pause(self, call: Call) -> Answer:
        mode = call.body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            detail = f"{{'type': 'literal_error', 'loc': ('body', 'mode'), 'input': {mode!r}}}"
            message = f"1 validation error:\n  {detail}: must be 'abort', 'retract' or 'in_place'"
            return as_json({"object": "error", "message": message}, 400)
        await done(self.engine.pause(mode))
        return as_json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, call: Call) -> Answer:
        await done(self.engine.resume())
        return as_json({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, call: Call) -> Answer:
        flushed = await done(self.engine.flush())
        return Answer(200, FLUSHED.encode()) if flushed else Answer(400, b"Flush cache failed.\n")

    # Information ------------------------------------------------------------------------------------------------------

    async def _health(self, call: Call) -> Answer:
        if self.engine.failure is not None:
            return refusal(f"The engine has failed: {self.engine.failure!r}", 503)
        return Answer(503 if self.engine.paused else 200)

    async def _model_info(self, call: Call) -> Answer:
        return as_json(information.model_info(self.engine, self.weights.model_path, self.tokenizer_path))

    async def _server_info(self, call: Call) -> Answer:
        return as_json(information.server_info(self.engine, self.weights.model_path, self.arguments))

    async def _models(self, call: Call) -> Answer:
        return as_json(information.models(self.engine, self.weights.model_path))

    async def _loads(self, call: Call) -> Answer:
        return as_json(information.loads(self.engine, await done(self.engine.call(self.engine.occupancy))))


def failure_of(requests: list[Request]) -> Answer | None:
    """The answer 500 if the engine died under these requests."""
    for request in requests:
        reason = request.finish_reason or {}
        if reason.get("status_code") == 500:
            return refusal(reason["message"], 500)
    return None
