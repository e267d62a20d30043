"""Generating through the inference replicas, whatever happens to them meanwhile."""

from __future__ import annotations

import asyncio
import logging
import statistics
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any

from meshy.generation import commands
from meshy.generation.balance import Balancer
from meshy.generation.completion import (
    Completion,
    GenerationError,
    check_candidates,
    check_tokens,
    read_answer,
    sampling_fields,
)
from meshy.generation.control import Control
from meshy.generation.keeper import Keeper
from meshy.generation.own_time import OwnTime
from meshy.generation.transport import Refused, Transport, Unavailable
from meshy.generation.turns import Turns
from meshy.recipe import Sampling

log = logging.getLogger("meshy.generation")

RECENT = 1024  # requests whose own time is kept


class GenerationClient(Control):
    """For use within one event loop: `async with GenerationClient(urls, vocab_size=...) as client`.

    urls: one per replica. vocab_size: ids from it on are refused before they are sent.
    deadline: seconds in which a request must end, retries and pauses included.
    max_in_flight_per_replica: requests that are sent to one of them at once; the others wait here. None: no bound.
    silence: seconds after which a replica that answers none of its requests is asked whether it is there; if it does
    not say so within ten more, they go elsewhere.
    restart_interrupted: a response that was aborted, or that more than one weight version wrote, begins anew.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        vocab_size: int | None = None,
        deadline: float = 600.0,
        max_in_flight_per_replica: int | None = None,
        silence: float = 10.0,
        restart_interrupted: bool = False,
    ) -> None:
        self._http = Transport()
        super().__init__([url.rstrip("/") for url in urls], self._http, deadline)
        self.vocab_size = vocab_size
        self.balance = Balancer(self.urls, max_in_flight_per_replica)
        self._restart = restart_interrupted
        self._turns = Turns()
        self._keeper = Keeper(self.urls, self._http, silence, on_back=self._turns.wake_all)
        self.rotation = self._keeper.rotation
        self.numbers = self._keeper.numbers
        self._own_seconds: deque[float] = deque(maxlen=RECENT)
        self._aborts: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> GenerationClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._keeper.close()
        if self._aborts:
            await asyncio.wait(self._aborts)
        await self._http.close()

    def require(self, version: int) -> None:
        """Every token of requests that are sent from now on is written by weights v`version` or later."""
        if self._keeper.require(version):
            self.balance.forget_idle()

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        seed: int | None = None,
        candidates: int = 0,
        rid: str | None = None,
        key: str | None = None,
        first: bool = False,
        restart: bool | None = None,
    ) -> Completion:
        """Continue `tokens`, to the end.

        A part that was interrupted (aborted by a pause, or lost with its server) is taken up again from what is known
        to be written, on any replica, with as many tokens less to write; so is one that older weights wrote than were
        required when it was sent. seed: the same seed and tokens give the same continuation, also when it is resumed.
        candidates: how many of the likeliest tokens are told for each written one. key: requests of one key go to one
        replica. first: it goes before those that wait for a place in a replica. restart: see `restart_interrupted`;
        None: as the client was told. Raises GenerationError.
        """
        if self.vocab_size is not None:
            check_tokens(tokens, self.vocab_size)
            check_candidates(candidates, self.vocab_size)
        restart = self._restart if restart is None else restart
        work = OwnTime(
            self._generate(list(tokens), sampling, seed, candidates, rid or uuid.uuid4().hex, key, first, restart)
        )
        completion = await work
        self._own_seconds.append(work.seconds)
        return completion

    def own_seconds(self) -> float:
        """What one request takes of this client's time, apart from waiting: the median of the last ones."""
        return statistics.median(self._own_seconds) if self._own_seconds else 0.0

    async def queues(self, seconds: float = 1.0) -> dict[str, int]:
        """{url: requests that wait for a place in that replica}, of those that say so within that time."""
        told = await self.give(dict.fromkeys(self.urls, commands.LOADS), seconds, patience=0.0)
        return {url: sum(load["num_waiting_reqs"] for load in loads["loads"]) for url, loads in told.answers.items()}

    # One request ------------------------------------------------------------------------------------------------------

    async def _generate(
        self,
        prompt: list[int],
        sampling: Sampling,
        seed: int | None,
        candidates: int,
        rid: str,
        key: str | None,
        first: bool,
        restart: bool,
    ) -> Completion:
        end = asyncio.get_running_loop().time() + self.deadline
        completion = Completion()
        attempt, wait = 0, 0.05
        trouble = "not sent yet"
        while True:
            most = sampling.max_new_tokens - len(completion.tokens)
            body: dict[str, Any] = {
                "input_ids": prompt + completion.tokens,
                "sampling_params": sampling_fields(sampling, most, seed),
                "return_logprob": True,
                "rid": rid if attempt == 0 else f"{rid}-{attempt}",
            }
            if candidates:
                body["top_logprobs_num"] = candidates
            load = len(prompt) + sampling.max_new_tokens
            # What was begun goes on before others begin, or long responses would be overtaken at every update.
            url = await self._place(load, key, end, first or attempt > 0)
            if url is None:
                raise GenerationError(self._too_late(attempt, len(completion.tokens), trouble))
            attempt += 1
            at_least = max(self.rotation.required, *completion.versions[-1:], -1)
            try:
                part = await self._part(url, body, at_least, end)
            except Unavailable as error:
                self.numbers[url].retries += 1
                trouble = str(error)
                log.debug("%s: %s; it goes elsewhere", rid, trouble)
                continue
            finally:
                self.balance.release(url, load, key)
                self._turns.wake()
            completion.append(part)
            if part.finish_reason != "abort" and not (restart and len(set(completion.versions)) > 1):
                return completion
            if restart:
                self.numbers[url].retries += 1
                completion = Completion()
            if len(completion.tokens) >= sampling.max_new_tokens:
                completion.finish_reason = "length"
                return completion
            trouble = f"{url} aborted it, or was given new weights"
            wait = 0.05 if part.tokens else min(2 * wait, 1.0)
            if not part.tokens:
                await asyncio.sleep(wait)

    async def _place(self, load: int, key: str | None, end: float, first: bool) -> str | None:
        """The replica that takes the request, as soon as there is one; None when its time is over. first: before those
        that wait already."""
        if asyncio.get_running_loop().time() >= end:
            return None
        at_once = first or not self._turns
        if at_once and (url := self.balance.acquire(self.rotation.fit, load, key)) is not None:
            return url
        try:
            async with asyncio.timeout_at(end):
                while True:
                    await self._turns.wait(first=first)
                    first = True
                    if (url := self.balance.acquire(self.rotation.fit, load, key)) is not None:
                        return url
        except TimeoutError:
            return None

    async def _part(self, url: str, body: dict[str, Any], at_least: int, end: float) -> Completion:
        """One attempt. Unavailable: the replica could not be used for it."""
        try:
            async with asyncio.timeout_at(end) as limit:
                with self._keeper.call(url, at_least, limit) as call:
                    answer = await self._http.request("POST", url + "/generate", body, None)
        except TimeoutError as error:
            self._abort_in_background(url, body["rid"])
            raise Unavailable(call.interrupted or f"{url} did not answer in the request's time") from error
        except Unavailable as error:
            self._keeper.failed(url, str(error))
            self._abort_in_background(url, body["rid"])  # it may still be running there
            raise
        except Refused as error:
            raise GenerationError(str(error)) from error
        except asyncio.CancelledError:
            self._abort_in_background(url, body["rid"])
            raise
        return self._used(url, answer, body, at_least)

    def _used(self, url: str, answer: Any, body: dict[str, Any], at_least: int) -> Completion:
        """What an answer holds. Unavailable if it says that the replica cannot serve, or older weights wrote it."""
        part = read_answer(answer, url, body["sampling_params"]["max_new_tokens"], body.get("top_logprobs_num", 0))
        meta = answer["meta_info"]
        reason = meta["finish_reason"]
        if (reason.get("status_code") or 0) >= 500:
            why = f"{url} aborted: {reason.get('message')}"
            self._keeper.failed(url, why)
            raise Unavailable(why)
        if part.versions and not self._keeper.shows(url, oldest := min(part.versions), at_least):
            self.numbers[url].stale += 1
            raise Unavailable(f"{url} answered with weights v{oldest}, v{at_least} is required")
        self._keeper.answered(url)
        self.numbers[url].used(meta, len(part.tokens))
        return part

    def _too_late(self, attempts: int, tokens: int, trouble: str) -> str:
        out = self.rotation.reasons()
        told = f"; out of rotation: {'; '.join(out)}" if out else ""
        return (
            f"no generation within {self.deadline:.0f} s and {attempts} attempts ({tokens} tokens so far): "
            f"{trouble}{told}"
        )

    def _abort_in_background(self, url: str, rid: str) -> None:
        """Nobody waits for that request any more: let the server have its slot back."""

        async def abort() -> None:
            try:
                await self._http.request("POST", url + "/abort_request", {"rid": rid}, 5.0)
            except (Unavailable, Refused) as error:
                log.debug("could not abort %s: %s", rid, error)

        task = asyncio.get_running_loop().create_task(abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
