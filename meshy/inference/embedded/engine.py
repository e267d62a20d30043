"""The engine's loop. One thread owns model, cache and queues; every other thread sends it calls, done between steps."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from meshy.generation.commands import PauseMode
from meshy.inference.embedded.batch import FlatBatch, flatten
from meshy.inference.embedded.request import Request, RequestError
from meshy.inference.embedded.runner import ModelRunner
from meshy.inference.embedded.sampler import SamplingBatch, draw
from meshy.inference.embedded.scheduler import Plan, Scheduler
from meshy.inference.embedded.scoring import append_candidates, score_inputs
from meshy.inference.embedded.weights import WeightError, WeightUpdate
from meshy.inference.parts import Parts

T = TypeVar("T")

MEMORY = {"weights", "kv_cache"}
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING = {"type": "abort", "message": "Abort in waiting queue"}
MAX_BUSY_SECONDS = 1.0  # a busy interval is reported at the latest after this long

log = logging.getLogger("meshy.inference.engine")


class EngineFailure(RuntimeError):
    """The engine's thread has died; its cause is the exception that killed it."""


@dataclass(slots=True)
class Counters:
    """Since the engine started; written by its thread only."""

    generated_tokens: int = 0
    finished_requests: int = 0
    busy_seconds: float = 0.0
    steps: int = 0


class Occupancy(NamedTuple):
    """Requests running, queued, and held back by a pause or an update; tokens in the cache."""

    running: int
    waiting: int
    held: int
    used_tokens: int


class Engine:
    """Generates. `deliver` is called on the engine's thread, once per step, with the requests that have news: those
    that ended and those that stream. `on_busy(start, end)` is told, in time.time() seconds, when it computed;
    `on_end` that the thread has ended, `failure` holding why if it failed.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_running: int,
        max_prefill_tokens: int = 8192,
        weight_version: str = "0",
        deliver: Callable[[list[Request]], None] = lambda requests: None,
        on_busy: Callable[[float, float], None] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.runner = runner
        self.scheduler = Scheduler(max_running, max_prefill_tokens)
        self.weight_version = weight_version
        self.deliver = deliver
        self.counters = Counters()
        self.failure: BaseException | None = None
        self.paused: PauseMode | None = None
        self.freed = False  # its memory is somebody else's, by its ring
        self._on_busy = on_busy
        self._on_end = on_end
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._door = threading.Lock()
        self._ended_for_good = False
        self._arrivals: list[Request] = []  # accepted, but held while paused or while an update waits
        self._updates: list[tuple[Callable[[], object], Future[Any]]] = []
        self._held = False
        self._news: list[Request] = []
        self._sampling: tuple[list[Request], SamplingBatch] | None = None
        self._busy_since: float | None = None
        self._busy_until = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # Called from any thread -------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float = 10.0) -> None:
        """Abort what runs and end the thread. May be called twice."""
        with suppress(EngineFailure):
            self._post(self._close)
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def submit(self, requests: Iterable[Request]) -> None:
        """Hand in requests; their outcome comes through `deliver`. Raises EngineFailure when the engine is dead."""
        batch = list(requests)
        self._post(lambda: self._arrivals.extend(batch))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the engine's thread, between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the future
                future.set_exception(error)

        self._post(run)
        return future

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop stepping. `abort` ends what runs, `retract` gives up its keys, `in_place` keeps them."""
        return self.call(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        return self.call(self._resume)

    def abort(self, rids: set[str] | None) -> Future[int]:
        """End the requests with these ids (None: all) with what they have. Returns how many there were."""
        return self.call(lambda: self._abort(rids))

    def flush(self) -> Future[bool]:
        """Whether nothing holds keys or waits for them (there is no prefix cache to drop)."""
        return self.call(self._flushable)

    def exclusive(self, function: Callable[[], T], *, abort_all: bool = False) -> Future[T]:
        """Run a function on the engine's thread, at once when paused, else when the requests accepted so far have
        ended; those that come meanwhile wait for it. It may raise WeightError or RequestError.
        """
        future: Future[T] = Future()
        self._post(lambda: self._updates.append((function, future)))
        if abort_all:
            self._post(lambda: self._abort(None))
        return future

    def hold(self, function: Callable[[], T], *, abort_all: bool = False) -> Future[T]:
        """Run a function like `exclusive`; unless it raises, nobody computes with the weights or loads others until
        `let_go`."""
        return self.exclusive(lambda: self._hold(function), abort_all=abort_all)

    def let_go(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the engine's thread, and hold no more, whatever becomes of it."""
        return self.call(lambda: self._let_go(function))

    def update_weights(self, update: WeightUpdate) -> Future[str]:
        """Load a folder's weights, exclusively. Resolves to the new version; WeightError leaves the old weights."""
        return self.exclusive(lambda: self._update(update), abort_all=update.abort_all)

    def release(self, tags: set[str]) -> Future[None]:
        """Give back the memory of `weights`, `kv_cache` or both, until resumed. RequestError while requests run."""
        return self.call(lambda: self._release(tags))

    def take_memory(self, tags: set[str]) -> Future[None]:
        """Take it again. RequestError where it is not ours to take."""
        return self.call(lambda: self._take_memory(tags))

    def free(self) -> Future[Parts]:
        """Retract what runs, and give back all memory until `restore`. Requests and updates wait meanwhile, and nobody
        else can have the memory taken again."""
        return self.call(self._free)

    def restore(self, folder: Path | None, version: str | None) -> Future[Parts]:
        """Take the memory again and go on: with the weights in that folder as that version, or as they were.
        WeightError where the folder's cannot be loaded; then it stays freed."""
        return self.call(lambda: self._restore(folder, version))

    # The engine's thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._take_calls(wait=not self._can_step())
                self._update_if_ready()
                if not (self.paused or self._updates or self._held):
                    self.scheduler.add(self._arrivals)
                    self._arrivals.clear()
                if self._can_step():
                    self._step()
                else:
                    self._report_busy()
                self._deliver()
        except BaseException as error:
            log.exception("the engine has failed")
            self.failure = error
        self._end()
        self._on_end()

    def _can_step(self) -> bool:
        may = self.paused is None and not self._held and not self.freed
        return may and self.runner.ready and self.scheduler.busy

    def _take_calls(self, wait: bool) -> None:
        if wait:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _step(self) -> None:
        start = time.time()
        if self._busy_since is None:
            self._busy_since = start
        plan = self.scheduler.plan()
        if not (plan.decode or plan.prefill):
            return
        requests = plan.decode + plan.prefill
        batch = flatten(plan.decode, plan.prefill)
        logits = self.runner.forward(batch, plan.moves, int(max(r.length for r in requests)))
        score_inputs(batch.input_rows, logits)
        for request in plan.prefill:
            request.first_scheduled = request.first_scheduled or start
        self._sample(plan, requests, batch, logits)
        self._busy_until = time.time()
        self.counters.steps += 1
        self.counters.busy_seconds += self._busy_until - start
        if self._busy_until - self._busy_since >= MAX_BUSY_SECONDS:
            self._report_busy()

    def _sample(self, plan: Plan, requests: list[Request], batch: FlatBatch, logits: Tensor) -> None:
        """Draw one token for each request and hand it over."""
        sampling = self._sampling_batch(requests)
        if plan.prefill:
            logits = logits[torch.from_numpy(batch.logit_of).to(logits.device)]
        rows = len(requests)
        drawn = draw(logits[:rows], sampling, np.array([r.length for r in requests], dtype=np.int64))
        version, now = self.weight_version, time.time()
        append_candidates(requests, drawn.all_logprobs)
        for request, token, logprob in zip(requests, drawn.tokens.tolist(), drawn.logprobs.tolist(), strict=True):
            request.append(token, logprob, version)
            if request.finish_reason is not None:
                self._ended(request)
            elif request.stream:
                self._news.append(request)
        for request in plan.prefill:
            request.first_token = request.first_token or now
        self.counters.generated_tokens += rows

    def _sampling_batch(self, requests: list[Request]) -> SamplingBatch:
        """Reused as long as the same requests stand in the same rows."""
        if self._sampling is None or self._sampling[0] != requests:
            self._sampling = (requests, SamplingBatch.of(requests, self.runner.device))
        return self._sampling[1]

    def _ended(self, request: Request) -> None:
        self.counters.finished_requests += 1
        self._news.append(request)

    def _deliver(self) -> None:
        if self._news:
            news, self._news = self._news, []
            self.deliver(news)

    def _report_busy(self) -> None:
        if self._busy_since is not None:
            if self._on_busy is not None:
                self._on_busy(self._busy_since, max(self._busy_since, self._busy_until))
            self._busy_since = None

    def occupancy(self) -> Occupancy:
        """How full it is; to be called on its own thread."""
        running = [request for request in self.scheduler.running if not request.finished]
        used = sum(request.length for request in running)
        return Occupancy(len(running), len(self.scheduler.waiting), len(self._arrivals), used)

    # Commands, on the engine's thread ---------------------------------------------------------------------------------

    def _pause(self, mode: PauseMode) -> None:
        self.paused = mode
        if mode == "abort":
            self._abort_accepted(None)
        elif mode == "retract":
            self.scheduler.retract()

    def _resume(self) -> None:
        self.paused = None

    def _abort(self, rids: set[str] | None) -> int:
        held = [r for r in self._arrivals if rids is None or r.rid in rids]
        self._arrivals = [r for r in self._arrivals if r not in held]
        for request in held:
            request.finish(dict(ABORTED_WAITING))
            self._ended(request)
        return len(held) + self._abort_accepted(rids)

    def _abort_accepted(self, rids: set[str] | None) -> int:
        running, waiting = self.scheduler.remove(rids)
        for request in running:
            request.finish(dict(ABORTED))
        for request in waiting:
            request.finish(dict(ABORTED_WAITING))
        for request in running + waiting:
            self._ended(request)
        self._drop_ended()
        return len(running) + len(waiting)

    def _drop_ended(self) -> None:
        """When nothing is left running, forget the ended ones at once, so that the engine counts as idle."""
        if all(request.finished for request in self.scheduler.running):
            self.scheduler.running = []

    def _flushable(self) -> bool:
        self._drop_ended()
        rests = self.paused is not None or self.freed
        return not self.scheduler.running and (rests or not self.scheduler.waiting)

    def _update_if_ready(self) -> None:
        self._drop_ended()
        while self._updates and self._may_update():
            function, future = self._updates.pop(0)
            self._report_busy()
            try:
                future.set_result(function())
            except (WeightError, RequestError) as error:
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(EngineFailure(f"the engine has failed: {error!r}"))
                raise

    def _may_update(self) -> bool:
        return not self._held and not self.freed and (self.paused is not None or not self.scheduler.busy)

    def _hold(self, function: Callable[[], T]) -> T:
        result = function()
        self._held = True
        return result

    def _let_go(self, function: Callable[[], T]) -> T:
        self._held = False
        return function()

    def _update(self, update: WeightUpdate) -> str:
        if update.flush_cache:
            self.require_flushable()
        self.runner.weights.load_folder(update.folder)
        if update.version is not None:
            self.weight_version = update.version
        return self.weight_version

    def require_flushable(self) -> None:
        """Raises RequestError where a request holds keys; on its own thread."""
        if not self._flushable():
            raise RequestError(
                "Weights were not updated, because the cache cannot be flushed while requests are still running or "
                "queued. Retract or finish them, or send flush_cache=false."
            )

    def _release(self, tags: set[str]) -> None:
        self._drop_ended()
        if self._held:
            raise RequestError("Memory cannot be released while weights are being received.")
        if self.scheduler.running:
            raise RequestError(
                "Memory cannot be released while requests are running; pause generation (retract) first."
            )
        self.runner.release(tags)

    def _take_memory(self, tags: set[str]) -> None:
        if self.freed:
            raise RequestError("Memory cannot be resumed: the GPU is another service's until the ring's token is back.")
        self.runner.resume(tags)

    def _free(self) -> Parts:
        if self._held:
            raise RequestError("The GPU cannot be freed while weights are being received.")
        parts = Parts()
        self.scheduler.retract()
        self._sampling = None
        self.freed = True
        with parts.of("release"):
            self.runner.release(MEMORY)
        return parts

    def _restore(self, folder: Path | None, version: str | None) -> Parts:
        parts = Parts()
        if folder is not None:
            with parts.of("load"):
                self.runner.weights.load_folder(folder)
            self.weight_version = version or self.weight_version
        with parts.of("resume"):
            self.runner.resume(MEMORY)
        self.freed = False
        return parts

    def _close(self) -> None:
        self._abort(None)
        self._closing = True

    def _post(self, call: Callable[[], object]) -> None:
        """Put a call into the inbox. Under a lock, so that none comes in after the thread has emptied it for good."""
        with self._door:
            if self._ended_for_good:
                raise EngineFailure("the engine has ended") from self.failure
            self._inbox.put(call)

    def _end(self) -> None:
        """Leave no one waiting: end every request and every call."""
        with self._door:
            self._ended_for_good = True
        self._take_calls(wait=False)
        message = f"the engine has ended: {self.failure!r}"
        for request in [*self._arrivals, *self.scheduler.waiting, *self.scheduler.running]:
            if not request.finished:
                request.finish({"type": "abort", "message": message, "status_code": 500, "err_type": "EngineFailure"})
                self._news.append(request)
        for _, future in self._updates:
            future.set_exception(EngineFailure(message))
        self._report_busy()
        self._deliver()
