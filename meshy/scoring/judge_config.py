"""The configuration of a judge. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from meshy.columns import FINISH_REASON, LOSS_MASK, PROMPT_ID, TOKENS, TRAIN, Column, Consumes, Produces
from meshy.importing import nearest
from meshy.recipe import Recipe, ServiceConfig


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(ServiceConfig):
    """Asks a language model how good each response is (arXiv 2306.05685), over an OpenAI-style endpoint, and writes
    what it says into `column`, one number a row. The trainer learns from it once its `rewards` name the column.

    url: of the endpoint, up to and with `/v1`. group: instead, a group of this recipe that answers requests, such as
        one of inference that serves another model. One of both.
    model: its name, as the endpoint wants it. api_key_env: the environment variable that holds the key; None: no key.
    prompt: import path or callable, from a RewardSample to chat messages. parse: from the reply and that sample to a
        number; ValueError where the reply holds none.
    max_tokens, temperature: of the reply. concurrency: replies that are waited for at once, by one replica.
    request_deadline: seconds for one reply. attempts: requests for one row, until one is answered and can be read,
        with a longer wait before each. fallback: what a response gets that could not be judged; None: the service
        fails, naming it.
    route: only rows that have the column `route.<route>` (see `routes` of rollout). None: all.
    """

    service: ClassVar[str] = "meshy.scoring.judge:JudgeService"

    max_restarts: int = 3
    url: str | None = None
    group: str | None = None
    model: str = "default"
    api_key_env: str | None = None
    prompt: str | Callable[..., Any] = "meshy.scoring.judge_prompt:grade_prompt"
    parse: str | Callable[..., Any] = "meshy.scoring.judge_prompt:read_grade"
    max_tokens: int = 512
    temperature: float = 0.0
    concurrency: int = 64
    request_deadline: float = 120.0
    attempts: int = 5
    fallback: float | None = None
    column: str = "judge_reward"
    route: str | None = None

    def consumes(self, recipe: Recipe) -> tuple[Consumes, ...]:
        return (Consumes(TRAIN, (PROMPT_ID, TOKENS, LOSS_MASK, FINISH_REASON), route=self.route),)

    def produces(self, recipe: Recipe) -> tuple[Produces, ...]:
        column = Column(self.column, "float32", doc="how good a judge finds the response")
        return (Produces(TRAIN, (column,), route=self.route),)

    def faults(self, recipe: Recipe) -> list[str]:
        limits: tuple[tuple[bool, str, Any, str], ...] = (
            ((self.url is None) != (self.group is None), "url", self.url, "a url, or a group, and not both"),
            (
                self.url is None or self.url.startswith(("http://", "https://")),
                "url", self.url, "one that begins with http:// or https://",
            ),
            (self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1"),
            (self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more"),
            (self.concurrency >= 1, "concurrency", self.concurrency, "at least 1"),
            (self.request_deadline > 0, "request_deadline", self.request_deadline, "more than 0 seconds"),
            (self.attempts >= 1, "attempts", self.attempts, "at least 1"),
            (self.column.isidentifier(), "column", repr(self.column), "a name such as 'judge_reward'"),
        )  # fmt: skip
        faults = [f"{name}: expected {expected}, got {value}" for fine, name, value, expected in limits if not fine]
        serving = [group.id for group in recipe.groups if group.config.serves_http]
        if self.group is not None and self.group not in serving:
            faults.append(f"group: no group {self.group!r} answers requests{nearest(self.group, serving)}")
        return faults

    def preflight(self, recipe: Recipe) -> list[str]:
        from meshy.scoring.judge_preflight import judge_faults

        return judge_faults(self)
