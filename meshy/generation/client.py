"""Generating through the inference replicas, whatever happens to them meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from meshy.generation.balance import Balancer
from meshy.generation.completion import Completion, GenerationError, check_tokens, sampling_fields
from meshy.generation.control import Control
from meshy.generation.transport import Refused, Transport, Unavailable
from meshy.recipe import Sampling

log = logging.getLogger("meshy.generation")


class GenerationClient(Control):
    """For use within one event loop: `async with GenerationClient(urls, vocab_size=...) as client`.

    urls: one per replica. vocab_size: ids from it on are refused before they are sent.
    deadline: seconds in which a request must end, retries and pauses included.
    max_in_flight: requests that are sent at once, over all replicas; the others wait here. None: no bound.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        vocab_size: int | None = None,
        deadline: float = 600.0,
        max_in_flight: int | None = None,
    ) -> None:
        self._http = Transport()
        super().__init__([url.rstrip("/") for url in urls], self._http, deadline)
        self.vocab_size = vocab_size
        self.balance = Balancer(self.urls)
        self._slots = None if max_in_flight is None else asyncio.Semaphore(max_in_flight)
        self._aborts: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> GenerationClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._aborts:
            await asyncio.wait(self._aborts)
        await self._http.close()

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        seed: int | None = None,
        rid: str | None = None,
        key: str | None = None,
    ) -> Completion:
        """Continue `tokens`, to the end.

        A part that was interrupted (aborted by a pause, or lost with its server) is taken up again from what is known
        to be written, on any replica, with as many tokens less to write. seed: the same seed and tokens give the same
        continuation, also when it is resumed. key: requests of one key go to one replica. Raises GenerationError.
        """
        if self.vocab_size is not None:
            check_tokens(tokens, self.vocab_size)
        async with self._slots or nullcontext():
            return await self._generate(list(tokens), sampling, seed, rid or uuid.uuid4().hex, key)

    async def _generate(
        self, prompt: list[int], sampling: Sampling, seed: int | None, rid: str, key: str | None
    ) -> Completion:
        end = time.monotonic() + self.deadline
        completion = Completion()
        attempt, wait = 0, 0.05
        while True:
            written = len(completion.tokens)
            body = {
                "input_ids": prompt + completion.tokens,
                "sampling_params": sampling_fields(sampling, sampling.max_new_tokens - written, seed),
                "return_logprob": True,
                "rid": rid if attempt == 0 else f"{rid}-{attempt}",
            }
            attempt += 1
            trouble = await self._part(body, completion, key, end)
            if trouble is not None:
                log.log(logging.WARNING if attempt == 1 else logging.INFO, "%s; trying again", trouble)
            if trouble is None and completion.finish_reason != "abort":
                return completion
            if len(completion.tokens) >= sampling.max_new_tokens:
                completion.finish_reason = "length"
                return completion
            if trouble is None and len(completion.tokens) > written:
                wait = 0.05
                continue
            if time.monotonic() + wait > end:
                raise GenerationError(
                    f"no generation within {self.deadline:.0f} s and {attempt} attempts "
                    f"({len(completion.tokens)} tokens so far): {trouble or 'aborted by the server'}"
                ) from trouble
            await asyncio.sleep(wait)
            wait = min(2 * wait, 1.0)

    async def _part(
        self, body: dict[str, Any], completion: Completion, key: str | None, end: float
    ) -> Unavailable | None:
        """One attempt: extends `completion`, or returns why the replica could not be used."""
        url = self.balance.acquire(key)
        try:
            left = max(0.0, end - time.monotonic())
            answer = await self._http.request("POST", url + "/generate", body, left)
            reason = answer["meta_info"]["finish_reason"]
            if (reason.get("status_code") or 0) >= 500:
                raise Unavailable(f"{url} aborted: {reason.get('message')}")
            completion.extend(answer, url)
        except Unavailable as error:
            self.balance.failed(url)
            self._abort_in_background(url, body["rid"])  # it may still be running there
            return error
        except Refused as error:
            raise GenerationError(str(error)) from error
        except asyncio.CancelledError:
            self._abort_in_background(url, body["rid"])
            raise
        finally:
            self.balance.release(url, key)
        return None

    def _abort_in_background(self, url: str, rid: str) -> None:
        """Nobody waits for that request any more: let the server have its slot back."""

        async def abort() -> None:
            try:
                await self._http.request("POST", url + "/abort_request", {"rid": rid}, 5.0)
            except (Unavailable, Refused) as error:
                log.info("could not abort %s: %s", rid, error)

        task = asyncio.get_running_loop().create_task(abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
