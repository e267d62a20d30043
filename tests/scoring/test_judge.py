"""A judge: what it is refused for, an endpoint that misbehaves, and runs that learn from what it says."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from meshy.columns import derive_contract
from meshy.generation.transport import Transport
from meshy.importing import load_file
from meshy.observe.jsonl import read_jsonl
from meshy.refusals import value_faults
from meshy.rewards.sample import RewardSample
from meshy.scoring import judge as judging
from meshy.scoring.judge import JudgeError, JudgeService
from meshy.scoring.judge_config import JudgeConfig
from meshy.scoring.judge_preflight import judge_faults
from meshy.scoring.judge_prompt import grade_prompt, read_grade
from tests.launch import launched

RECIPE = "tests/scoring/judged.py"
SAMPLE = RewardSample(prompt=({"role": "user", "content": "2+2"},), response="4", answer="4")


def test_the_question_the_answer_and_what_is_known_are_shown():
    system, user = grade_prompt(SAMPLE)
    assert "beside the reference answer" in system["content"] and "0 (wrong" in system["content"]
    assert user["content"] == "Question:\nuser: 2+2\n\nReference answer:\n4\n\nAnswer:\n4"
    system, user = grade_prompt(dataclasses.replace(SAMPLE, answer=None))
    assert "eference" not in system["content"] + user["content"]


@pytest.mark.parametrize(("text", "grade"), [("9", 0.9), ("It is 12 off.\n7.5", 0.75), ("Grade: 10/10 -> 10", 1.0)])
def test_the_last_number_is_the_grade(text: str, grade: float):
    assert read_grade(text, SAMPLE) == grade


@pytest.mark.parametrize("text", ["", "good", "11", "-1", "4 or 40"])
def test_what_is_no_grade_is_none(text: str):
    with pytest.raises(ValueError, match="no grade from 0 to 10"):
        read_grade(text, SAMPLE)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"url": None, "group": None}, "url: expected a url, or a group, and not both"),
        ({"url": "http://x/v1", "group": "inference"}, "not both"),
        ({"url": "x/v1", "group": None}, "begins with http"),
        ({"group": "inferense"}, "no group 'inferense' answers requests (did you mean 'inference'?)"),
        ({"group": "trainer"}, "no group 'trainer' answers requests"),
        ({"attempts": 0}, "attempts: expected at least 1"),
        ({"concurrency": 0}, "concurrency"),
        ({"request_deadline": 0.0}, "request_deadline"),
    ],
)
def test_fields_that_cannot_be_are_refused(options: dict[str, Any], told: str):
    recipe = load_file(RECIPE).recipe()
    groups = tuple(
        dataclasses.replace(g, config=dataclasses.replace(g.config, **options)) if g.id == "judge" else g
        for g in recipe.groups
    )
    faults = value_faults(dataclasses.replace(recipe, groups=groups))
    assert any(told in fault for fault in faults), faults


def test_a_judge_that_nobody_listens_to_is_refused():
    recipe = load_file(RECIPE).recipe()
    groups = tuple(
        dataclasses.replace(g, config=dataclasses.replace(g.config, rewards={"reward": 1.0}))
        if g.id == "trainer"
        else g
        for g in recipe.groups
    )
    _, faults = derive_contract(dataclasses.replace(recipe, groups=groups).declarations())
    assert any("train.judge_reward" in fault and "is read by nobody" in fault for fault in faults)


def test_functions_and_keys_that_are_not_there_are_said_before_anything_is_started(monkeypatch):
    assert judge_faults(JudgeConfig(group="inference")) == []
    faults = judge_faults(
        JudgeConfig(prompt="no.where:f", parse="meshy.scoring.judge_prompt:BEST", api_key_env="NO_KEY")
    )
    assert [fault.partition(":")[0] for fault in faults] == ["prompt", "parse", "api_key_env"]
    monkeypatch.setenv("NO_KEY", "secret")
    assert judge_faults(JudgeConfig(api_key_env="NO_KEY")) == []


# An endpoint of the tests' own ----------------------------------------------------------------------------------------

Reply = Callable[[web.Request], Any]


@asynccontextmanager
async def endpoint(*replies: Reply) -> AsyncIterator[tuple[str, list[web.Request]]]:
    """Each request gets the next reply, the last one over and over."""
    seen: list[web.Request] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(request)
        reply = replies[min(len(seen), len(replies)) - 1](request)
        return await reply if asyncio.iscoroutine(reply) else reply

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/chat/completions", seen
    finally:
        await runner.cleanup()


def says(text: str) -> Reply:
    return lambda request: web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})


def refuses(status: int) -> Reply:
    return lambda request: web.json_response({"error": {"message": "not now"}}, status=status)


async def hangs(request: web.Request) -> web.Response:
    await asyncio.sleep(30)
    return web.Response()


async def closes(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


def judged(*replies: Reply, monkeypatch: pytest.MonkeyPatch, key: str = "", **options: Any):
    """What a judge makes of SAMPLE: its score or its error, the requests, and the judge."""
    monkeypatch.setattr(judging, "FIRST_WAIT", 0.01)
    config = JudgeConfig(url="http://unused", request_deadline=0.5, attempts=3)
    service = object.__new__(JudgeService)
    service.config = dataclasses.replace(config, **options)
    service.prompt, service.parse = grade_prompt, read_grade
    service.judged = service.retries = service.fell_back = 0
    service.seconds = 0.0
    service.log = __import__("logging").getLogger("judge")

    async def ask():
        async with endpoint(*replies) as (url, seen):
            service.urls, service.http = [url], Transport({"authorization": f"Bearer {key}"} if key else None)
            try:
                return await service._score("7.0", SAMPLE), seen, service
            finally:
                await service.http.close()

    return asyncio.run(ask())


@pytest.mark.parametrize(
    "trouble", [refuses(429), refuses(500), refuses(503), hangs, closes, says("well"), lambda r: web.json_response([])]
)
def test_what_may_pass_is_tried_again(trouble: Reply, monkeypatch):
    score, seen, service = judged(trouble, trouble, says("8"), monkeypatch=monkeypatch, key="secret")
    assert (score, len(seen), service.retries, service.fell_back) == (0.8, 3, 2, 0)
    assert seen[0].headers["authorization"] == "Bearer secret"


def test_what_will_not_pass_is_said_with_row_and_reason(monkeypatch):
    with pytest.raises(JudgeError, match=r"row 7\.0 could not be judged after 1 of 3 attempts: .*401: not now"):
        judged(refuses(401), monkeypatch=monkeypatch)
    with pytest.raises(JudgeError, match=r"after 3 of 3 attempts: the reply cannot be read .*'well'"):
        judged(says("well"), monkeypatch=monkeypatch)
    with pytest.raises(JudgeError, match="did not answer within"):
        judged(hangs, monkeypatch=monkeypatch, attempts=1)


def test_a_fallback_is_what_such_a_response_gets(monkeypatch):
    score, _, service = judged(says("well"), monkeypatch=monkeypatch, fallback=-0.5)
    assert (score, service.fell_back) == (-0.5, 1)


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.e2e
@pytest.mark.prove
def test_what_a_judge_says_is_what_the_trainer_learns_from(tmp_path: Path):
    """The policy's own engine judges: it agrees with some of what it has sampled. Killed, the judge comes back."""
    with launched(tmp_path, recipe=RECIPE, slots=2) as run:
        run.wait_for_line("step", 120)
        run.service("judge.0").send_signal(signal.SIGKILL)
        assert run.wait(170) == 0, run.output
    steps = read_jsonl(tmp_path / "metrics.jsonl")
    assert [step["samples"] for step in steps] == [32, 32]
    assert all(0 < step["reward_mean"] < 1 for step in steps), steps
    assert json.loads((tmp_path / "summary.json").read_text())["restarts"] == {"judge.0": 1}
