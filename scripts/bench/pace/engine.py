"""The sleeping engine: one event loop that holds requests for as long as an engine would take to answer them."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from meshy.listening import listen
from meshy.observe.jsonl import JsonlWriter
from meshy.service import Context, Service
from scripts.bench.pace.answers import Handler, as_json, with_json
from scripts.bench.pace.decoding import Decoding, Job
from scripts.bench.pace.lengths import response_length
from scripts.bench.pace.roles import SleepingEngineConfig

LOGPROB = -1.0  # of every token
MODES = ("abort", "retract", "in_place")
START_SECONDS = 30.0
MAX_BODY = 1 << 26  # bytes


class SleepingEngine(Service):
    """Answers from the end of `setup` on, in a thread of its own. Writes to arrivals.<replica>.jsonl when each weight
    version got its first request."""

    config: SleepingEngineConfig

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._started, self._ended = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)
        self.server: SleepingServer | None = None

    def setup(self) -> None:
        self._thread.start()
        if not self._started.wait(START_SECONDS):
            raise TimeoutError(f"the engine did not start within {START_SECONDS:.0f} s")
        if self._failure is not None:
            raise self._failure

    def run(self) -> None:
        self._ended.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        if self._loop is not None and self.server is not None and not self._ended.is_set():
            self._loop.call_soon_threadsafe(self.server.stop)
        if self._thread.ident is not None:
            self._thread.join(10)

    def _serve(self) -> None:
        try:
            asyncio.run(self._until_stopped())
        except BaseException as error:  # noqa: BLE001  (raised by whoever waits for the thread)
            self._failure = error
        finally:
            self._started.set()
            self._ended.set()

    async def _until_stopped(self) -> None:
        replica = self.context.replica
        self._loop = asyncio.get_running_loop()
        with JsonlWriter(self.context.folder.path / f"arrivals.{replica.index}.jsonl") as arrivals:
            self.server = SleepingServer(
                self.config,
                on_busy=lambda start, end: self.timeline.record("decode", start, end),
                on_first=lambda version, when: arrivals.write({"weight_version": version, "first_request": when}),
            )
            assert replica.endpoint_port is not None
            async with self.server.on(replica.host, replica.endpoint_port):
                self._started.set()
                await self.server.stopped.wait()

    def health(self) -> dict[str, Any]:
        if self.server is None:
            return {}
        slots = self.server.decoding
        return {"weight_version": slots.version, "running": slots.running, "queued": slots.waiting}

    def metrics(self) -> dict[str, float]:
        if self.server is None:
            return {}
        slots = self.server.decoding
        return {"generated_tokens": slots.tokens, "running": slots.running, "queued": slots.waiting}


class SleepingServer:
    """The routes. To be made in the event loop in which it serves.

    on_busy: told, in unix seconds, from when to when something was running. on_first: told the weight version and when,
    in unix seconds, the first request came while that version was served.
    """

    def __init__(
        self,
        config: SleepingEngineConfig,
        on_busy: Callable[[float, float], None] = lambda start, end: None,
        on_first: Callable[[int, float], None] = lambda version, when: None,
    ) -> None:
        self.config = config
        self.stopped = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.decoding = Decoding(config.slots, config.step_seconds, self._loop.time())
        self._timer: asyncio.TimerHandle | None = None
        self._on_busy, self._on_first = on_busy, on_first
        self._asked_at = -1  # the newest weight version that a request has come to
        self._busy_since: float | None = None

    def on(self, host: str, port: int) -> Serving:
        """`async with server.on(host, port) as port:` it answers there; port 0 takes any that is free."""
        return Serving(self, host, port)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY)
        posts: dict[str, Handler] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/update_weights_from_disk": self._update,
            "/update_weight_version": self._set_version,
        }
        for path, handler in posts.items():
            app.router.add_post(path, with_json(handler))
        gets = {"/health": self._health, "/model_info": self._model_info, "/server_info": self._server_info}
        for path, get in {**gets, "/v1/loads": self._loads}.items():
            app.router.add_get(path, get)
        return app

    def stop(self) -> None:
        """Every request is answered, as aborted."""
        self.decoding.abort(None, self._loop.time())
        self._pump()
        self.stopped.set()

    def _pump(self) -> None:
        """Answer what has ended, and wake up when the next one does."""
        for job in self.decoding.advance(self._loop.time()):
            if not job.sink.done():
                job.sink.set_result(None)
        self._note_busy()
        if self._timer is not None:
            self._timer.cancel()
        end = self.decoding.next_end()
        self._timer = None if end is None else self._loop.call_at(end, self._pump)

    def _note_busy(self) -> None:
        """Report the time in which something ran, when it ends, and now and then."""
        busy, now = bool(self.decoding.running) and not self.decoding.paused, time.time()
        if self._busy_since is not None and (not busy or now - self._busy_since > 1.0):
            self._on_busy(self._busy_since, now)
            self._busy_since = None
        if busy and self._busy_since is None:
            self._busy_since = now

    # Generation -------------------------------------------------------------------------------------------------------

    async def _generate(self, body: dict[str, Any]) -> web.Response:
        if self.decoding.version > self._asked_at:
            self._asked_at = self.decoding.version
            self._on_first(self._asked_at, time.time())
        prompt, sampling, rid = body["input_ids"], body["sampling_params"], str(body["rid"])
        most = int(sampling["max_new_tokens"])
        left = self._length(prompt, sampling.get("sampling_seed"), rid) - self._already(prompt)
        began = self._loop.time()
        job = Job(rid, min(max(left, 1), most), sink=self._loop.create_future())
        self.decoding.submit(job, began)
        self._pump()
        try:
            await job.sink
        finally:
            if not job.ended:  # the client has gone away
                self.decoding.abort({rid}, self._loop.time())
                self._pump()
        reason: dict[str, Any] = {"type": "length", "length": most}
        if job.aborted:
            reason = {"type": "abort", "message": "Aborted"}
        elif left <= most:
            reason = {"type": "stop", "matched": self.config.end_token}
        return as_json(self._answer(job, len(prompt), reason, self._loop.time() - began))

    def _length(self, prompt: list[int], seed: int | None, rid: str) -> int:
        """Of the whole response, whatever part of it the prompt holds already."""
        if seed is None:
            seed = int.from_bytes(hashlib.sha256(f"{rid}/{prompt}".encode()).digest()[:4], "big") >> 1
        return response_length(int(seed), mean=self.config.mean_length, sigma=self.config.sigma)

    def _already(self, prompt: list[int]) -> int:
        """Tokens at the end of a prompt that this engine has written."""
        count = 0
        while count < len(prompt) and prompt[-1 - count] == self.config.token:
            count += 1
        return count

    def _answer(self, job: Job, prompt_tokens: int, reason: dict[str, Any], seconds: float) -> dict[str, Any]:
        tokens = [self.config.token] * job.written
        if reason["type"] == "stop":
            tokens[-1] = self.config.end_token
        meta = {
            "id": job.rid,
            "finish_reason": reason,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": job.written,
            "cached_tokens": 0,
            "weight_version": str(job.spans[-1][0] if job.spans else self.decoding.version),
            "weight_versions": [{"version": str(v), "start": start, "end": end} for v, start, end in job.spans],
            "output_token_logprobs": [[LOGPROB, token, None] for token in tokens],
            "e2e_latency": seconds,
        }
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    async def _abort(self, body: dict[str, Any]) -> web.Response:
        self.decoding.abort(None if body.get("abort_all") else {str(body.get("rid"))}, self._loop.time())
        self._pump()
        return web.Response()

    # Control ----------------------------------------------------------------------------------------------------------

    async def _pause(self, body: dict[str, Any]) -> web.Response:
        mode = body.get("mode", "abort")
        if mode not in MODES:
            return as_json({"message": f"mode must be one of {MODES}, not {mode!r}"}, 400)
        self.decoding.pause(self._loop.time())
        if mode == "abort":
            self.decoding.abort(None, self._loop.time())
        self._pump()
        return as_json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, body: dict[str, Any]) -> web.Response:
        self.decoding.resume(self._loop.time())
        self._pump()
        return as_json({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, body: dict[str, Any]) -> web.Response:
        return web.Response(text="Cache flushed.\n")

    async def _update(self, body: dict[str, Any]) -> web.Response:
        """Weights cost nothing: the version is another one from the next step on, and generation goes on."""
        return self._now_at(body["weight_version"], abort=bool(body.get("abort_all_requests", False)))

    async def _set_version(self, body: dict[str, Any]) -> web.Response:
        return self._now_at(body["new_version"], abort=bool(body.get("abort_all_requests", True)))

    def _now_at(self, version: object, abort: bool) -> web.Response:
        now = self._loop.time()
        if abort:
            self.decoding.abort(None, now)
        self.decoding.set_version(int(str(version)), now)
        self._pump()
        return as_json({"success": True, "message": f"Weight version updated to {version}."})

    # Information ------------------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.decoding.paused else 200)

    async def _model_info(self, request: web.Request) -> web.Response:
        return as_json({"model_path": "sleeping", "weight_version": str(self.decoding.version)})

    async def _server_info(self, request: web.Request) -> web.Response:
        about = {"version": "sleeping", "tp_size": 1, "dp_size": 1, "max_running_requests": self.config.slots}
        return as_json(
            {**about, "weight_version": str(self.decoding.version), "generated_tokens": self.decoding.tokens}
        )

    async def _loads(self, request: web.Request) -> web.Response:
        slots = self.decoding
        return as_json({"loads": [{"num_running_reqs": slots.running, "num_waiting_reqs": slots.waiting}]})


class Serving:
    """A server on its port, from entry to exit."""

    def __init__(self, server: SleepingServer, host: str, port: int) -> None:
        self._socket = listen(host, port, backlog=4096)
        # A request whose client goes away is cancelled, which aborts it.
        self._runner = web.AppRunner(
            server.application(), handler_cancellation=True, access_log=None, shutdown_timeout=5.0
        )

    async def __aenter__(self) -> int:
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket).start()
        port: int = self._socket.getsockname()[1]
        return port

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
