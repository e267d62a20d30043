"""Asking an endpoint for verdicts: one response after several attempts, whatever goes wrong meanwhile. Knows no
queue."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshy.generation.balance import Balancer
from meshy.generation.transport import Refused, Transport, Unavailable
from meshy.rewards.sample import RewardSample, to_score
from meshy.scoring.judge_config import JudgeConfig
from meshy.service.exits import Unrecoverable

LATER = (408, 429)  # statuses below 500 of what may succeed later
FOR_ALL = (401, 403, 404)  # statuses of what is wrong with the key, the model or the URL
LONGEST_WAIT = 30.0  # seconds
SHOWN = 500  # characters of an answer that a message shows

Messages = list[dict[str, Any]]


class NotJudged(RuntimeError):
    """There is no verdict on a response; the message says what came of the last attempt."""


class JudgeRefuses(Unrecoverable):
    """The endpoint refuses whoever asks: its URL, the model's name or the key is wrong."""


class _Unreadable(Exception):
    """An answer without a verdict."""


@dataclass(frozen=True)
class Verdict:
    """text: the judge's own words. attempts, seconds: that it took."""

    score: float
    text: str
    attempts: int
    seconds: float


class JudgeEndpoint:
    """For use within one event loop; `close` at the end.

    urls: of one API each, all alike. prompt, parse: see JudgeConfig. key: sent as a bearer token, and left out of
    whatever is said.
    """

    def __init__(
        self,
        config: JudgeConfig,
        urls: Sequence[str],
        prompt: Callable[[RewardSample], Messages],
        parse: Callable[[str, RewardSample], Any],
        key: str | None = None,
    ) -> None:
        self._config, self._prompt, self._parse, self._key = config, prompt, parse, key
        self._urls = [url.rstrip("/") for url in urls]
        self._balance = Balancer(self._urls)
        self._http = Transport(None if key is None else {"authorization": f"Bearer {key}"})
        self.retried = 0
        self.trouble = ""  # what has gone wrong since the last verdict

    async def close(self) -> None:
        await self._http.close()

    async def verdict(self, sample: RewardSample) -> Verdict:
        """Raises NotJudged when no attempt gave one, JudgeRefuses when none would for any response, and what `prompt`
        raises."""
        config, began = self._config, time.monotonic()
        body = self._body(self._prompt(sample))
        avoid: str | None = None  # the replica that has just failed, while there are others
        for attempt in range(1, config.attempts + 1):
            url = self._balance.acquire([one for one in self._urls if one != avoid] or self._urls, 1)
            assert url is not None
            try:
                text = self._text(await self._answer(url, body), url)
                score = self._read(text, sample)
            except Unavailable as error:
                self.trouble, avoid, wait = self._without_key(error), url, self._pause(attempt)
            except _Unreadable as error:
                self.trouble, wait = self._without_key(error), 0.0
            else:
                self.trouble = ""
                return Verdict(score, text, attempt, time.monotonic() - began)
            finally:
                self._balance.release(url, 1)
            if attempt < config.attempts:
                self.retried += 1
                await asyncio.sleep(wait)
        raise NotJudged(f"no verdict in {config.attempts} attempts; the last one: {self.trouble}")

    def _body(self, messages: Messages) -> dict[str, Any]:
        config = self._config
        fields = {
            "model": config.model,
            "messages": messages,
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
            **config.request,
        }
        return {name: value for name, value in fields.items() if value is not None}

    async def _answer(self, url: str, body: Mapping[str, Any]) -> Any:
        try:
            return await self._http.request("POST", url + "/chat/completions", body, self._config.request_deadline)
        except Refused as error:
            told = self._without_key(error)
            if error.status in LATER:
                raise Unavailable(told) from None
            if error.status in FOR_ALL:
                raise JudgeRefuses(f"{told}; see to the judge's url, model and api_key_env") from None
            raise NotJudged(told) from None

    def _text(self, answer: Any, url: str) -> str:
        try:
            (choice, *_) = answer["choices"]
            text, reason = choice["message"]["content"], choice.get("finish_reason")
        except (LookupError, TypeError, ValueError, AttributeError):
            raise Unavailable(f"{url} gave no chat completion: {_short(answer)}") from None
        if reason == "abort":  # by new weights, or because the engine ends
            raise Unavailable(f"{url} broke its answer off: {_short(text)}")
        if reason == "length" and not self._config.allow_truncated:
            raise _Unreadable(
                f"{url}: max_tokens={self._config.max_tokens} cut its answer off: {_short(text)}; raise it, or set "
                "allow_truncated"
            )
        if not isinstance(text, str):
            raise _Unreadable(f"{url} answered without any text: {_short(answer)}")
        return text

    def _read(self, text: str, sample: RewardSample) -> float:
        try:
            return to_score(self._parse(text, sample))
        except Exception as error:
            raise _Unreadable(f"no verdict in {_short(text)}: {type(error).__name__}: {error}") from error

    def _pause(self, attempt: int) -> float:
        """Seconds before the next attempt; not the same for all, that what failed together is not asked together."""
        return min(self._config.backoff * 2.0 ** (attempt - 1), LONGEST_WAIT) * random.uniform(0.5, 1.0)

    def _without_key(self, error: Exception) -> str:
        """What it says; a server may repeat the key that it was given."""
        return str(error) if self._key is None else str(error).replace(self._key, "(the key)")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."
