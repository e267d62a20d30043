"""A generative judge: what it asks, what it makes of whatever comes back, and what it is refused for."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshy.data.addition import addition
from meshy.inference.config import InferenceConfig
from meshy.observe.jsonl import read_jsonl
from meshy.recipe import Recipe, ServiceGroup
from meshy.refusals import value_faults
from meshy.rewards.sample import RewardSample
from meshy.scoring.evaluation import greedy_answers
from meshy.scoring.judge_config import JudgeConfig
from meshy.scoring.judge_endpoint import JudgeEndpoint, JudgeRefuses, NotJudged, Verdict
from meshy.scoring.judge_prompt import out_of_ten, tenth
from meshy.service.exits import ENDED_AS_ASKED, UNRECOVERABLE
from tests.launch import launched
from tests.scoring.judge_stage import DEADLINE, DEMO, KEY, JudgeProcess, JudgeStage, judge_stage
from tests.scoring.judged import same_sum
from tests.scoring.oracle import Act, Oracle, answers, hangs, hangs_up, one_after_another, oracle, says

SAMPLE = RewardSample(prompt=({"role": "user", "content": "3+4"},), response="#7", answer="7")


# What is asked, and what is read --------------------------------------------------------------------------------------


def test_the_question_the_response_and_the_reference_are_shown():
    (message,) = out_of_ten(SAMPLE)
    assert message["role"] == "user"
    for part in ("<question>\n3+4\n</question>", "<response>\n#7\n</response>", "<reference>\n7\n</reference>"):
        assert part in message["content"]


def test_without_a_reference_none_is_spoken_of_and_several_messages_have_their_roles():
    prompt = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4"})
    (message,) = out_of_ten(RewardSample(prompt=prompt, response="#7", answer=None))
    assert "reference" not in message["content"]
    assert "system: Be brief.\n\nuser: 3+4" in message["content"]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("7", 0.7),
        ("**10**", 1.0),
        ("0", 0.0),
        ("Score: 8.", 0.8),
        ("7.5", 0.75),
        ("8/10", 0.8),
        ("I give it 6 out of 10.", 0.6),
        ("<think>3 of 100 would see it; a 4?</think>\n9", 0.9),
        ("6, for 42 is wrong", 0.6),
        ("5 (v2)", 0.5),
    ],
)
def test_a_tenth_of_the_last_number_that_fits_is_the_reward(text, score):
    assert tenth(text, SAMPLE) == pytest.approx(score)


@pytest.mark.parametrize("text", ["", "good", "11", "-3", "85%", "1.2.3"])
def test_a_text_without_such_a_number_is_no_verdict(text):
    with pytest.raises(ValueError, match="no number from 0 to 10"):
        tenth(text, SAMPLE)


# One response ---------------------------------------------------------------------------------------------------------


def settings(**fields: Any) -> JudgeConfig:
    quick: dict[str, Any] = {"url": "http://unused", "model": "wise", "backoff": 0.01, "request_deadline": 5.0}
    return JudgeConfig(**{**quick, "attempts": 3, **fields})


def ask(config: JudgeConfig, *urls: str, prompt=out_of_ten, parse=tenth, key=None) -> tuple[Verdict, JudgeEndpoint]:
    async def main() -> tuple[Verdict, JudgeEndpoint]:
        endpoint = JudgeEndpoint(config, urls, prompt, parse, key)
        try:
            return await endpoint.verdict(SAMPLE), endpoint
        finally:
            await endpoint.close()

    return asyncio.run(main())


def test_it_sends_what_the_api_asks_for_and_the_key_in_a_header_only():
    with oracle() as judge:
        verdict, endpoint = ask(settings(request={"top_p": 0.5}), judge.url, key=KEY)
        ask(settings(max_tokens=None, temperature=None, model=None), judge.url + "/")
    assert (verdict.score, verdict.text, verdict.attempts, endpoint.retried) == (0.7, "7", 1, 0)
    rest = {name: value for name, value in judge.bodies[0].items() if name != "messages"}
    assert rest == {"model": "wise", "max_tokens": 1024, "temperature": 0.0, "top_p": 0.5}
    assert judge.bodies[0]["messages"] == out_of_ten(SAMPLE)
    assert judge.headers[0]["authorization"] == f"Bearer {KEY}"
    assert set(judge.bodies[1]) == {"messages"} and "authorization" not in judge.headers[1]


@pytest.mark.parametrize(
    "act",
    [
        answers(429, {"error": {"message": "slow down"}}),
        answers(500, {"error": {"message": "oh"}}),
        answers(503, {}),
        answers(200, {"choices": []}),
        answers(200, ["what"]),
        answers(200, {"choices": [7]}),
        hangs_up,
        says("who am I to judge"),
        says(None),
        says("8", reason="length"),
        says("8", reason="abort"),
    ],
    ids=["429", "500", "503", "no choice", "a list", "a number", "hangs up", "nonsense", "no text", "cut off", "abort"],
)
def test_what_may_go_better_is_tried_again(act):
    with oracle(act, act) as judge:
        verdict, endpoint = ask(settings(), judge.url)
    assert (verdict.score, verdict.attempts, endpoint.retried, endpoint.trouble) == (0.7, 3, 2, "")
    with oracle(*[act] * 3) as judge, pytest.raises(NotJudged, match="no verdict in 3 attempts; the last one: "):
        ask(settings(), judge.url)
    assert len(judge.bodies) == 3


def test_an_answer_that_was_cut_off_counts_where_a_recipe_says_so():
    with oracle(says("8", reason="length")) as judge:
        assert ask(settings(allow_truncated=True), judge.url)[0].score == 0.8
    with oracle(says("8", reason="length")) as judge, pytest.raises(NotJudged, match=r"max_tokens=1024 cut .* '8'"):
        ask(settings(attempts=1), judge.url)


def test_one_that_hangs_is_given_up_after_the_deadline():
    began = time.monotonic()
    with oracle(hangs) as judge:
        verdict, _ = ask(settings(request_deadline=0.5), judge.url)
    assert verdict.attempts == 2 and 0.5 <= time.monotonic() - began < 10


def test_nobody_there_is_said_with_the_url():
    with pytest.raises(NotJudged, match=r"http://127.0.0.1:9/v1/chat/completions could not be reached"):
        ask(settings(), "http://127.0.0.1:9/v1")


def test_pauses_double():
    with oracle(*[answers(500, {})] * 3) as judge:
        verdict, _ = ask(settings(attempts=4, backoff=0.2), judge.url)
    assert 0.5 * (0.2 + 0.4 + 0.8) <= verdict.seconds < 10


def test_another_replica_is_asked_after_one_that_failed():
    with oracle() as broken, oracle() as whole:
        broken.otherwise = answers(500, {})
        for urls in ((broken.url, whole.url), (whole.url, broken.url)):
            assert ask(settings(attempts=2), *urls)[0].score == 0.7
    assert len(broken.bodies) == 1 and len(whole.bodies) == 2


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_model_or_url_is_not_tried_again_and_the_key_is_not_shown(status):
    with oracle() as judge:
        judge.otherwise = answers(status, {"error": {"message": f"{KEY} is no key of ours"}})
        with pytest.raises(JudgeRefuses, match=r"\(the key\) is no key of ours; see to the judge's url") as raised:
            ask(settings(), judge.url, key=KEY)
    assert len(judge.bodies) == 1 and f"answered {status}" in str(raised.value)
    assert raised.value.__suppress_context__, "the error below it has the key"


def test_a_response_that_the_endpoint_refuses_is_not_tried_again():
    with (
        oracle(answers(400, {"error": {"message": "too long"}})) as judge,
        pytest.raises(NotJudged, match="answered 400: too long"),
    ):
        ask(settings(), judge.url)
    assert len(judge.bodies) == 1


def test_whatever_a_parser_raises_or_returns_that_is_no_number_is_no_verdict():
    for parse in (lambda text, sample: None, lambda text, sample: float("nan"), lambda text, sample: text.index("x")):
        with oracle() as judge, pytest.raises(NotJudged, match="no verdict in '7': ValueError"):
            ask(settings(), judge.url, parse=parse)
    with oracle() as judge:
        assert ask(settings(), judge.url, parse=lambda text, sample: sample.answer == text)[0].score == 1.0


# What it is refused for -----------------------------------------------------------------------------------------------


def recipe_with(config: JudgeConfig, wait_for: tuple[str, ...] = ("inference",)) -> Recipe:
    return Recipe(
        model="somewhere",
        data="nowhere:task",
        groups=(
            ServiceGroup(id="inference", config=InferenceConfig(), gpus_per_replica=1),
            ServiceGroup(id="judge", config=config, wait_for=wait_for),
        ),
    )


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "url, group: expected one of both"),
        ({"url": "http://x/v1", "model": "m", "group": "inference"}, "url, group: expected one of both"),
        ({"url": "http://[::1", "model": "m"}, "url: 'http://.* is no URL: Invalid IPv6"),
        ({"url": "http://x:99999/v1", "model": "m"}, "url: .* is no URL: Port out of range"),
        ({"url": "http://:8000/v1", "model": "m"}, "url: expected http://"),
        ({"url": "http://x/v1", "model": ""}, "model: expected a name, or none, got ''"),
        ({"url": "http://x/v1", "model": "m", "request": {"model": "y"}}, "request: model is a field of its own"),
        ({"url": "x/v1", "model": "m"}, "url: expected http://... or https://..., got 'x/v1'"),
        ({"url": "http://x/v1"}, "model: http://x/v1 has to be told which model"),
        ({"url": "http://x/v1/chat/completions", "model": "m"}, "url: .* goes too far"),
        ({"url": f"https://me:{KEY}@x/v1", "model": "m"}, "url: it holds a name or a password"),
        ({"group": "inferense"}, r"no group 'inferense' answers requests \(did you mean 'inference'\?\)"),
        ({"group": "judge"}, "no group 'judge' answers requests.*; those that do: inference"),
        ({"group": "inference", "api_key_env": "sk-very-secret"}, "api_key_env: expected the name of an environment"),
        ({"group": "inference", "attempts": 0}, "attempts: expected at least 1, got 0"),
        ({"group": "inference", "concurrency": 0}, "concurrency: expected at least 1"),
        ({"group": "inference", "request_deadline": 0.0}, "request_deadline: expected more than 0 seconds"),
        ({"group": "inference", "temperature": -1.0}, "temperature: expected 0 or more, or none"),
        ({"group": "inference", "max_tokens": 0}, "max_tokens: expected at least 1, or none"),
        ({"group": "inference", "column": "a b"}, "column: expected a name"),
    ],
)
def test_fields_that_cannot_be_are_refused_and_no_key_is_shown(fields, told):
    config = JudgeConfig(**fields)
    (fault,) = config.faults(recipe_with(config))
    assert KEY not in fault
    assert re.search(told, fault)


def test_it_waits_for_the_group_that_it_asks():
    config = JudgeConfig(group="inference")
    assert value_faults(recipe_with(config)) == []
    assert value_faults(recipe_with(config, wait_for=())) == [
        "judge.wait_for: the judge cannot ask 'inference' before that is ready; add it"
    ]


def test_a_key_that_is_not_there_and_functions_that_cannot_be_had_are_said_before_the_start(monkeypatch, tmp_path):
    def faults(**fields: Any) -> list[str]:
        config = JudgeConfig(group="inference", **fields)
        return config.preflight(recipe_with(config))

    monkeypatch.delenv("JUDGE_KEY", raising=False)
    assert faults() == []
    (fault,) = faults(api_key_env="JUDGE_KEY")
    assert "no environment variable JUDGE_KEY here" in fault
    monkeypatch.setenv("JUDGE_KEY", KEY)
    assert faults(api_key_env="JUDGE_KEY") == []
    (fault,) = faults(prompt="nowhere.at_all:ask")
    assert fault.startswith("prompt: ") and "there is no module 'nowhere'" in fault
    (fault,) = faults(parse="meshy.scoring.judge_prompt:MOST")
    assert (
        fault == "parse: meshy.scoring.judge_prompt:MOST is a int; name a function from a text and a RewardSample "
        "to a number"
    )
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    (fault,) = faults(parse=f"{broken}:parse")
    assert "raised ZeroDivisionError" in fault


# The service ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stage(tmp_path_factory) -> Iterator[JudgeStage]:
    with judge_stage(tmp_path_factory.mktemp("judge")) as stage:
        yield stage


def until(condition, judge: JudgeProcess) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, judge.log
        time.sleep(0.02)


def act_of(score: float) -> Act:
    return says(f"I say {score * 10:.0f}")


def verdicts(oracle_: Oracle, asked: dict[str, str]) -> dict[str, float]:
    """Have it answer these; what is expected of each row. Neighbours have different scores."""
    wanted = {uid: (i % 11) / 10 for i, uid in enumerate(asked)}
    oracle_.by_content.update({text: act_of(wanted[uid]) for uid, text in asked.items()})
    return wanted


@pytest.mark.e2e
def test_every_row_gets_its_own_verdict_with_few_in_hand_and_the_key_is_written_nowhere(stage, tmp_path):
    asked = stage.put([f"it is #{i}" for i in range(40)])
    first, second, *_ = asked
    with oracle() as oracle_, stage.judge(tmp_path / "run", oracle_.url, concurrency="4") as judge:
        wanted = verdicts(oracle_, asked)
        oracle_.by_content[asked[first]] = one_after_another(answers(429, {}), act_of(wanted[first]))
        assert stage.read(40) == pytest.approx(wanted)
        until(lambda: judge.health()["doing"] == "waiting for rows", judge)
        assert oracle_.most_running == 4
        assert oracle_.headers[0]["authorization"] == f"Bearer {KEY}"

        told = judge.metrics()
        assert (told["judged"], told["retried"], told["fell_back"], told["in_hand"]) == (40, 1, 0, 0)
        assert told["seconds"] > 0 and judge.health()["rows"] == 40
        lines = {line["uid"]: line for line in judge.verdicts}
        assert {uid: line["score"] for uid, line in lines.items()} == pytest.approx(wanted)
        assert (lines[first]["attempts"], lines[second]["attempts"]) == (2, 1)
        assert lines[second]["verdict"] == "I say 1"
        for file in judge.folder.path.rglob("*"):
            assert not file.is_file() or KEY not in file.read_text(errors="replace"), file


@pytest.mark.e2e
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.prove)])
def test_rows_in_the_hands_of_a_judge_that_ends_are_judged_by_its_next_life(stage, tmp_path, how):
    asked = stage.put([f"it is #{i}" for i in range(10)])
    first, *_ = asked
    with oracle() as oracle_:
        oracle_.otherwise = hangs
        oracle_.by_content[asked[first]] = act_of(0.5)
        with stage.judge(tmp_path / "first", oracle_.url, concurrency="4") as judge:
            judge.wait_ready()
            until(lambda: oracle_.running == 4 and judge.metrics()["judged"] == 1, judge)
            judge.process.send_signal(how)
            assert judge.process.wait(10) == (-9 if how == signal.SIGKILL else ENDED_AS_ASKED), judge.log
        wanted = {**verdicts(oracle_, asked), first: 0.5}
        with stage.judge(tmp_path / "second", oracle_.url) as judge:
            assert stage.read(10) == pytest.approx(wanted)
            until(lambda: judge.metrics()["in_hand"] == 0, judge)
            assert judge.metrics()["judged"] == 9


@pytest.mark.e2e
def test_what_cannot_be_judged_gets_the_fallback_and_many_in_a_row_end_the_service(stage, tmp_path):
    asked = stage.put(["a", "b", "c"])
    _, hopeless, _ = asked
    with oracle() as oracle_:
        wanted = {**verdicts(oracle_, asked), hopeless: -1.0}
        oracle_.by_content[asked[hopeless]] = says("no idea")
        with stage.judge(tmp_path / "run", oracle_.url, fallback="-1.0", attempts="2", max_fallbacks="2") as judge:
            assert stage.read(3) == pytest.approx(wanted)
            told = judge.metrics()
            assert (told["judged"], told["fell_back"], told["retried"]) == (2, 1, 1)
            assert "could not be judged: no verdict in 2 attempts" in judge.log and "'no idea'" in judge.log

            oracle_.otherwise = answers(400, {"error": {"message": "not today"}})
            stage.put(["d", "e", "f", "g"])
            assert judge.process.wait(DEADLINE) == 1, judge.log
            assert "number 3 in a row, more than max_fallbacks" in judge.log and "not today" in judge.log
        oracle_.otherwise = says("2")
        with stage.judge(tmp_path / "again", oracle_.url):
            assert {round(score, 3) for score in stage.read(4).values()} <= {-1.0, 0.2}


@pytest.mark.e2e
def test_without_a_fallback_the_row_and_the_last_answer_are_shown(stage, tmp_path):
    (uid,) = stage.put(["it is #1"])
    with oracle() as oracle_:
        oracle_.otherwise = says("hm, let me think")
        with stage.judge(tmp_path / "run", oracle_.url, attempts="2") as judge:
            assert judge.process.wait(DEADLINE) == 1, judge.log
            assert f"JudgeFailed: row {uid} could not be judged: no verdict in 2 attempts" in judge.log
            assert "'hm, let me think'" in judge.log and "set `fallback`" in judge.log and "it is #1" in judge.log
            assert "ExceptionGroup" not in judge.log
        oracle_.otherwise = says("3")
        with stage.judge(tmp_path / "again", oracle_.url):
            assert stage.read(1) == pytest.approx({uid: 0.3})


@pytest.mark.prove
def test_an_endpoint_that_refuses_ends_the_service_and_the_key_is_not_shown(stage, tmp_path):
    (uid,) = stage.put(["it is #1"])
    with oracle() as oracle_:
        oracle_.otherwise = answers(401, {"error": {"message": f"{KEY} is unknown"}})
        with stage.judge(tmp_path / "refused", oracle_.url, fallback="0.0") as judge:
            assert judge.process.wait(DEADLINE) == UNRECOVERABLE, judge.log
            assert "JudgeRefuses" in judge.log and f"while row {uid} was judged" in judge.log and KEY not in judge.log


@pytest.mark.e2e
def test_a_prompt_that_the_data_do_not_have_is_named(stage, tmp_path):
    stage.put(["it is #1"], prompt_id=["train-of-thought"])
    with oracle() as oracle_, stage.judge(tmp_path / "run", oracle_.url) as judge:
        assert judge.process.wait(DEADLINE) == UNRECOVERABLE, judge.log
        assert "no training prompt 'train-of-thought' here" in judge.log


# A run ----------------------------------------------------------------------------------------------------------------


@pytest.mark.prove
def test_the_policy_judges_itself_and_learns_from_that_alone(tmp_path):
    with launched(tmp_path, recipe="tests/scoring/judged.py", slots=2) as run:
        assert run.wait(170) == 0, run.output
    steps, lines = read_jsonl(tmp_path / "metrics.jsonl"), read_jsonl(tmp_path / "trajectories.jsonl")
    verdicts = {line["uid"]: line for line in read_jsonl(tmp_path / "judge.jsonl")}
    examples = {example.id: example for example in addition(max_digits=3).train}
    assert [step["samples"] for step in steps] == [64, 64]
    for step in steps:
        mine = [line for line in lines if line["step"] == step["step"]]
        scores = [verdicts[line["uid"]]["score"] if line["uid"] in verdicts else 0.0 for line in mine]
        assert 0 < sum(scores) < len(scores)
        assert step["reward_mean"] == pytest.approx(sum(scores) / len(scores), abs=1e-6)
        assert step["grad_norm"] > 0

    judged = [line for line in lines if line["step"] == 1 and line["uid"] in verdicts]
    asked = [examples[line["prompt_id"]] for line in judged]
    greedy = greedy_answers(DEMO, asked, {}, 60, torch.device("cpu"))  # of the weights that judged the first batch
    assert [verdicts[line["uid"]]["verdict"] for line in judged] == greedy
    for line, answer in zip(judged, greedy, strict=True):
        sample = RewardSample(prompt=(), response=line["response"], answer=None)
        assert verdicts[line["uid"]]["score"] == same_sum(answer, sample)
