"""The HTTP side: a lean ASGI application. It shares the interpreter with the engine's thread, so it does little.

Answers come from the engine in one bulk per step, through one wake-up of the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from meshy.generation.checksum import combined_checksum
from meshy.inference.embedded.chat import chat_answer, chat_requests
from meshy.inference.embedded.engine import Engine, EngineFailure, WeightUpdate, loads
from meshy.inference.embedded.protocol import RequestFactory, answer
from meshy.inference.embedded.request import Request, RequestError
from meshy.inference.embedded.weights import WeightError

VERSION = "meshy-embedded"
MEMORY_TAGS = {"weights", "kv_cache"}
FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the "
    "operation will not be performed.)\n"
)
JSON = b"application/json"


class MissingBody(RequestError):
    """A POST without its JSON body."""

    def __init__(self) -> None:
        super().__init__("1 validation error:\n  {'type': 'missing', 'loc': ('body',), 'msg': 'Field required', 'input': None}")


@dataclass(slots=True)
class Answer:
    status: int = 200
    body: bytes = b""
    content_type: bytes | None = None
    stream: AsyncIterator[bytes] | None = None


def as_json(value: Any, status: int = 200) -> Answer:
    return Answer(status, orjson.dumps(value), JSON)


def refusal(message: str, status: int = 400) -> Answer:
    return as_json({"error": {"message": message}}, status)


@dataclass(eq=False, slots=True)
class Job:
    """The requests of one HTTP call, and the loop-side event that tells of their progress."""

    requests: list[Request]
    pending: int
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Server:
    """`app` is the ASGI application; `deliver` is what the engine calls."""

    def __init__(self, engine: Engine, factory: RequestFactory, model_path: Path, arguments: dict[str, Any]) -> None:
        self.engine = engine
        self.factory = factory
        self.model_path = model_path
        self.tokenizer_path = model_path
        self.arguments = arguments
        self._loop: asyncio.AbstractEventLoop | None = None
        self._live: dict[str, Request] = {}
        get: dict[str, Callable[[], Awaitable[Answer]]] = {
            "/health": self._health,
            "/health_generate": self._health,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/v1/loads": self._loads,
            "/v1/models": self._models,
        }
        post: dict[str, Callable[[Any], Awaitable[Answer]]] = {
            "/generate": self._generate,
            "/v1/chat/completions": self._chat,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update_from_disk,
            "/update_weight_version": self._update_version,
            "/weights_checker": self._check_weights,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume_memory,
        }
        self._get, self._post = get, post
        engine.deliver = self.deliver

    # ASGI ---------------------------------------------------------------------------------------------------------------

    async def app(self, scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if scope["type"] != "http":
            return
        self._loop = asyncio.get_running_loop()
        result = await self._dispatch(scope["method"], scope["path"], receive)
        headers = [] if result.content_type is None else [(b"content-type", result.content_type)]
        if result.stream is None:
            headers.append((b"content-length", str(len(result.body)).encode()))
        await send({"type": "http.response.start", "status": result.status, "headers": headers})
        if result.stream is not None:
            async for chunk in result.stream:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": result.body})

    async def _dispatch(self, method: str, path: str, receive: Callable[..., Any]) -> Answer:
        body = await read_body(receive)
        try:
            if path in self._get and method == "GET":
                return await self._get[path]()
            if path == "/flush_cache" and method in ("GET", "POST"):
                return await self._flush()
            if path in self._post and method == "POST":
                return await self._post[path](parse(body))
        except MissingBody as error:
            return as_json({"object": "error", "message": str(error)}, 400)
        except RequestError as error:
            return refusal(str(error))
        except EngineFailure as error:
            return refusal(str(error), 500)
        known = path in self._get or path in self._post or path == "/flush_cache"
        return as_json({"detail": "Method Not Allowed"}, 405) if known else as_json({"detail": "Not Found"}, 404)

    # Generation -----------------------------------------------------------------------------------------------------------

    def deliver(self, news: list[Request]) -> None:
        """On the engine's thread: hand a step's news to the event loop in one go."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._take_news, news)

    def _take_news(self, news: list[Request]) -> None:
        for request in news:
            job: Job = request.sink
            if request.finished and self._live.pop(request.rid, None) is not None:
                job.pending -= 1
            if not job.pending or request.stream:
                job.news.set()

    def _submit(self, requests: list[Request]) -> Job:
        job = Job(requests, len(requests))
        for request in requests:
            if request.rid in self._live:
                raise RequestError(f"Duplicate request ID detected: {request.rid}")
            request.sink = job
        self._live.update((request.rid, request) for request in requests)
        self.engine.submit(requests)
        return job

    async def _finished(self, job: Job) -> None:
        """Until all requests of the job have ended; if the client goes away, they are aborted."""
        try:
            while job.pending:
                await job.news.wait()
                job.news.clear()
        except asyncio.CancelledError:
            self.engine.abort({request.rid for request in job.requests})
            raise

    async def _generate(self, body: Any) -> Answer:
        requests, batched = self.factory.generate(body)
        job = self._submit(requests)
        if requests[0].stream:
            return Answer(content_type=b"text/event-stream; charset=utf-8", stream=self._events(job, batched))
        await self._finished(job)
        failed = next((r for r in requests if (r.finish_reason or {}).get("status_code") == 500), None)
        if failed is not None and failed.finish_reason is not None:
            return refusal(failed.finish_reason["message"], 500)
        answers = [answer(request, self.factory.text) for request in requests]
        return as_json(answers if batched else answers[0])

    async def _events(self, job: Job, batched: bool) -> AsyncIterator[bytes]:
        """Server-sent events, each with all that has been written so far."""
        sent = dict.fromkeys(range(len(job.requests)), -1)
        try:
            while sent:
                await job.news.wait()
                job.news.clear()
                for index in list(sent):
                    request = job.requests[index]
                    ended, count = request.finished, len(request.output)
                    if count == sent[index] and not ended or count == 0 and not ended:
                        continue
                    sent[index] = count
                    event = answer(request, self.factory.text, None if ended else count)
                    if ended:
                        del sent[index]
                    yield b"data: " + orjson.dumps({**event, "index": index} if batched else event) + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            if sent:
                self.engine.abort({job.requests[index].rid for index in sent})

    async def _chat(self, body: Any) -> Answer:
        requests = chat_requests(body, self.factory)
        await self._finished(self._submit(requests))
        return as_json(chat_answer(body, requests, self.factory.text))

    async def _abort(self, body: Any) -> Answer:
        await on_engine(self.engine.abort(None if body.get("abort_all") else {str(body.get("rid", ""))}))
        return Answer()

    # Control ---------------------------------------------------------------------------------------------------------------

    async def _pause(self, body: Any) -> Answer:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            message = f"1 validation error:\n  {{'type': 'literal_error', 'loc': ('body', 'mode'), 'input': {mode!r}, "
            return as_json({"object": "error", "message": message + "'expected': \"abort, retract, in_place\"}"}, 400)
        await on_engine(self.engine.pause(mode))
        return as_json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, body: Any) -> Answer:
        await on_engine(self.engine.resume())
        return as_json({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self) -> Answer:
        flushed = await on_engine(self.engine.flush())
        return Answer(200, FLUSHED.encode()) if flushed else Answer(400, b"Flush cache failed.\n")

    async def _update_from_disk(self, body: Any) -> Answer:
        if not isinstance(body.get("model_path"), str):
            raise RequestError("update_weights_from_disk needs a model_path.")
        path = Path(body["model_path"])
        version = body.get("weight_version")
        update = WeightUpdate(
            folder=path,
            version=None if version is None else str(version),
            flush_cache=bool(body.get("flush_cache", True)),
            abort_all=bool(body.get("abort_all_requests", False)),
        )
        try:
            served = await on_engine(self.engine.update_weights(update))
        except (WeightError, RequestError) as error:
            return as_json({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        self.model_path = path
        suffix = "" if version is None else f" Weight version updated to {served}."
        message = f"Succeeded to update model weights.{suffix}"
        return as_json({"success": True, "message": message, "num_paused_requests": 0})

    async def _update_version(self, body: Any) -> Answer:
        version = body.get("new_version")
        if version is None:
            raise RequestError("update_weight_version needs a new_version.")
        if body.get("abort_all_requests", True):
            await on_engine(self.engine.abort(None))
        await on_engine(self.engine.call(lambda: setattr(self.engine, "weight_version", str(version))))
        message = f"Weight version updated to {version}"
        return as_json({"success": True, "message": message, "new_version": str(version)})

    async def _check_weights(self, body: Any) -> Answer:
        if body.get("action") != "checksum":
            raise RequestError(f"The embedded engine only knows the action 'checksum', not {body.get('action')!r}.")
        sums = await on_engine(self.engine.call(self.engine.runner.checksums))
        rank = {
            "checksums": sums,
            "per_gpu_checksum": combined_checksum(sums),
            "parallelism_info": {
                "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1, "rank": 0, "size": 1,
            },
        }  # fmt: skip
        return as_json({"success": True, "message": "Success.", "ranks": [rank]})

    async def _release(self, body: Any) -> Answer:
        tags = memory_tags(body)
        await on_engine(self.engine.call(lambda: self._release_when_idle(tags)))
        return as_json(None)

    def _release_when_idle(self, tags: set[str]) -> None:
        """On the engine's thread."""
        if self.engine.scheduler.running:
            raise RequestError("Memory cannot be released while requests are running; pause generation (retract) first.")
        self.engine.runner.release(tags)

    async def _resume_memory(self, body: Any) -> Answer:
        tags = memory_tags(body)
        await on_engine(self.engine.call(lambda: self.engine.runner.resume(tags)))
        return as_json(None)

    # Information ------------------------------------------------------------------------------------------------------------

    async def _health(self) -> Answer:
        if self.engine.failure is not None:
            return refusal(f"The engine has failed: {self.engine.failure!r}", 503)
        return Answer(503 if self.engine.paused else 200)

    async def _model_info(self) -> Answer:
        config = self.engine.runner.model.config
        return as_json(
            {
                "model_path": str(self.model_path),
                "served_model_name": str(self.tokenizer_path),
                "tokenizer_path": str(self.tokenizer_path),
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self.engine.weight_version,
                "load_format": "auto",
                "reasoning_parser": None,
                "tool_call_parser": None,
                "disaggregation_mode": "null",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": config.model_type,
                "architectures": config.architectures,
            }
        )

    async def _server_info(self) -> Answer:
        runner, counters = self.engine.runner, self.engine.counters
        info = {
            **self.arguments,
            "model_path": str(self.model_path),
            "tokenizer_path": str(self.tokenizer_path),
            "weight_version": self.engine.weight_version,
            "context_length": self.factory.limits.context_length,
            "max_running_requests": self.engine.scheduler.max_running,
            "max_total_num_tokens": runner.cache.slots * runner.cache.limit,
            "tp_size": 1,
            "dp_size": 1,
            "status": "ready" if self.engine.failure is None else "failed",
            "version": VERSION,
            "internal_states": [
                {
                    "generated_tokens": counters.generated_tokens,
                    "finished_requests": counters.finished_requests,
                    "busy_seconds": counters.busy_seconds,
                    "steps": counters.steps,
                }
            ],
        }
        return as_json(info)

    async def _models(self) -> Answer:
        model = {
            "id": str(self.model_path),
            "object": "model",
            "created": int(time.time()),
            "owned_by": "meshy",
            "root": str(self.model_path),
            "parent": None,
            "max_model_len": self.factory.limits.context_length,
        }
        return as_json({"object": "list", "data": [model]})

    async def _loads(self) -> Answer:
        now, runner, counters = time.time(), self.engine.runner, self.engine.counters
        load = await on_engine(self.engine.call(lambda: loads(self.engine)))
        capacity = runner.cache.slots * runner.cache.limit
        entry = {
            "timestamp": now,
            "dp_rank": 0,
            "num_running_reqs": load["running"],
            "num_waiting_reqs": load["waiting"],
            "num_waiting_uncached_tokens": 0,
            "num_used_tokens": load["used_tokens"],
            "num_total_tokens": load["used_tokens"],
            "num_active_tokens": load["used_tokens"],
            "max_total_num_tokens": capacity,
            "max_running_requests": self.engine.scheduler.max_running,
            "token_usage": load["used_tokens"] / capacity,
            "gen_throughput": counters.generated_tokens / counters.busy_seconds if counters.busy_seconds else 0.0,
            "cache_hit_rate": 0.0,
            "utilization": load["running"] / self.engine.scheduler.max_running,
            "memory": {
                "weight_gb": runner.weight_bytes / 2**30,
                "kv_cache_gb": runner.cache.bytes / 2**30,
                "graph_gb": 0.0,
                "token_capacity": capacity,
            },
            "queues": {
                "waiting": load["waiting"], "grammar": 0, "paused": load["held"], "retracted": 0, "prealloc_ready": 0,
            },
        }  # fmt: skip
        stamp = datetime.fromtimestamp(now, UTC).isoformat()
        return as_json(
            {"timestamp": stamp, "version": VERSION, "accelerator": None, "num_accelerators": 1, "loads": [entry]}
        )


async def on_engine(future: Any) -> Any:
    """The result of a call on the engine's thread. Not cancelled with the HTTP call: a command that began takes effect."""
    return await asyncio.shield(asyncio.wrap_future(future))


async def read_body(receive: Callable[..., Any]) -> bytes:
    message = await receive()
    body: bytes = message.get("body", b"")
    while message.get("more_body"):
        message = await receive()
        body += message.get("body", b"")
    return body


def parse(body: bytes) -> Any:
    """The JSON object of a POST. RequestError where there is none."""
    if not body:
        raise MissingBody
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"The body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object.")
    return value


def memory_tags(body: Any) -> set[str]:
    tags = set(body.get("tags") or MEMORY_TAGS)
    if not tags <= MEMORY_TAGS:
        raise RequestError(f"Unknown memory tags {sorted(tags - MEMORY_TAGS)}; known are {sorted(MEMORY_TAGS)}.")
    return tags
