"""The configuration of a generative judge. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

from meshy.columns import FINISH_REASON, LOSS_MASK, PROMPT_ID, TOKENS, TRAIN, Column, Consumes, Produces
from meshy.importing import nearest
from meshy.recipe import Limit, Recipe, ServiceConfig, out_of_range

OWN_FIELDS = ("model", "messages", "max_tokens", "temperature")
"""Of a request's body, what is not for `request`."""


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(ServiceConfig):
    """Asks a language model how good each response is (LLM as a judge, arXiv 2306.05685).

    It sends what `prompt` makes of a response to an endpoint that answers as OpenAI's `/chat/completions`, and writes
    what `parse` reads in the answer into `column`, one number a row. The trainer learns from it once its `rewards` name
    the column: {"judge_reward": 1.0}. It computes nothing itself and needs no GPU.

    Whom it asks, one of both:
        url: of the API, up to and with `/v1`. group: a group of this recipe that answers requests, such as "inference":
        then the policy judges itself, with the weights that it has at that moment. The judge must wait for it
        (`wait_for`). Its replicas are asked in turn, the least busy first.
        model: the name that is sent; a url needs one. api_key_env: the environment variable that holds the key, on the
        host of the judge; the key itself is written nowhere.
    What is asked:
        prompt: import path or callable, from a `RewardSample` (chat messages of the prompt, text of the response,
        reference answer, info of the example) to a list of chat messages. parse: from the text of the answer and that
        sample to a number; it raises where there is none. As they are, a number from 0 to 10 is asked for, and a tenth
        of it is the reward.
        max_tokens, temperature: of the answer; None: not sent. request: further fields of the request's body, such as
        {"chat_template_kwargs": {"enable_thinking": False}}. allow_truncated: take an answer that max_tokens has cut
        off for an answer; else it says nothing, for a number in half a thought is no verdict.
    When that fails:
        concurrency: responses that one replica has in its hands at once. request_deadline: seconds for one answer.
        attempts: for one response, where the endpoint cannot be reached, is late, answers 408, 429 or 5xx, or says
        nothing that `parse` can read. backoff: seconds before the second, twice as many before each that follows, up
        to 30. What it answers 401, 403 or 404 would be so for all, and ends the service.
        fallback: the reward of a response that could not be judged. max_fallbacks: how many in a row may get it before
        the service fails. None: the first one ends it, and is shown.
    route: only rows that have the column `route.<route>` (see `routes` of rollout). None: all.
    """

    service: ClassVar[str] = "meshy.scoring.judge:JudgeService"

    max_restarts: int = 3
    url: str | None = None
    group: str | None = None
    model: str | None = None
    api_key_env: str | None = None
    prompt: str | Callable[..., Any] = "meshy.scoring.judge_prompt:out_of_ten"
    parse: str | Callable[..., Any] = "meshy.scoring.judge_prompt:tenth"
    max_tokens: int | None = 1024
    temperature: float | None = 0.0
    request: Mapping[str, Any] = field(default_factory=dict)
    allow_truncated: bool = False
    concurrency: int = 32
    request_deadline: float = 120.0
    attempts: int = 6
    backoff: float = 1.0
    fallback: float | None = None
    max_fallbacks: int = 32
    column: str = "judge_reward"
    route: str | None = None

    def consumes(self, recipe: Recipe) -> tuple[Consumes, ...]:
        return (Consumes(TRAIN, (TOKENS, LOSS_MASK, PROMPT_ID, FINISH_REASON), route=self.route),)

    def produces(self, recipe: Recipe) -> tuple[Produces, ...]:
        column = Column(self.column, "float32", doc="how good a judge finds the response")
        return (Produces(TRAIN, (column,), route=self.route),)

    def faults(self, recipe: Recipe) -> list[str]:
        limits: tuple[Limit, ...] = (
            (self.column.isidentifier(), "column", repr(self.column), "a name such as 'judge_reward'"),
            (self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1, or none"),
            (
                self.temperature is None or self.temperature >= 0,
                "temperature", self.temperature, "0 or more, or none",
            ),
            (self.concurrency >= 1, "concurrency", self.concurrency, "at least 1"),
            (self.request_deadline > 0, "request_deadline", self.request_deadline, "more than 0 seconds"),
            (self.attempts >= 1, "attempts", self.attempts, "at least 1"),
            (self.backoff >= 0, "backoff", self.backoff, "0 seconds or more"),
            (self.max_fallbacks >= 0, "max_fallbacks", self.max_fallbacks, "0 or more"),
            (self.model != "", "model", repr(self.model), "a name, or none"),
        )  # fmt: skip
        faults = out_of_range(limits)
        faults += [f"request: {name} is a field of its own; set that" for name in OWN_FIELDS if name in self.request]
        if self.api_key_env is not None and not self.api_key_env.isidentifier():
            # It may be the key itself, which is not to be shown.
            faults.append("api_key_env: expected the name of an environment variable, such as 'OPENAI_API_KEY'")
        if (self.url is None) == (self.group is None):
            return [*faults, "url, group: expected one of both: the URL of an API, or a group of this recipe"]
        return faults + (self._group_faults(recipe) if self.url is None else self._url_faults(self.url))

    def _url_faults(self, url: str) -> list[str]:
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError as error:
            return [f"url: {url!r} is no URL: {error}"]
        if parts.username is not None or parts.password is not None:
            return ["url: it holds a name or a password, which would be written down; use api_key_env"]
        if parts.scheme not in ("http", "https") or not parts.hostname:
            return [f"url: expected http://... or https://..., got {url!r}"]
        faults = []
        if parts.path.rstrip("/").endswith("/chat/completions"):
            faults.append(f"url: {url!r} goes too far; end it before /chat/completions")
        if self.model is None:
            faults.append(f"model: {url} has to be told which model is to answer; give its name")
        return faults

    def _group_faults(self, recipe: Recipe) -> list[str]:
        serving = [group.id for group in recipe.groups if group.config.serves_http]
        if self.group not in serving:
            known = f"; those that do: {', '.join(serving)}" if serving else "; add an inference group"
            return [f"group: no group {self.group!r} answers requests{nearest(str(self.group), serving)}{known}"]
        own = next((group for group in recipe.groups if group.config is self), None)
        if own is not None and self.group not in own.wait_for:
            return [f"wait_for: the judge cannot ask {self.group!r} before that is ready; add it"]
        return []

    def preflight(self, recipe: Recipe) -> list[str]:
        from meshy.scoring.judge_preflight import judge_faults

        return judge_faults(self)
