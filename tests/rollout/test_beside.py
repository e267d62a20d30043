"""What a recipe may ask rollout for beside the rest: candidates, routes and a greedy response, in the real queue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meshy.data.order import DataOrder
from meshy.data.prompts import Chat
from meshy.generation import Completion, GenerationClient, GenerationError
from meshy.queue.errors import MissingColumn
from meshy.recipe import Recipe
from meshy.rollout.config import RolloutConfig
from meshy.rollout.group import greedy
from meshy.rollout.pacing import NothingSurvives
from meshy.rollout.preflight import load_task
from meshy.training.inbox import rows_of
from tests.rollout.play import Engine, Lead, Play, Trainer, topology_of, trainer_of
from tests.rollout.roles import HERE, MODEL, Learner, recipe_of

pytestmark = pytest.mark.e2e

BESIDE = ("student_topk_ids", "student_topk_logprobs", "greedy_reward")
ROUTES = ("route.math", "route.code")
K = 3


def recipe(**fields: Any) -> Recipe:
    config = RolloutConfig(group_size=2, candidates=K, greedy_baseline=True, routes=("math", "code"), **fields)
    return recipe_of(config, data=f"{HERE}:domains", steps=1, learner=Learner(batch_size=12, also=BESIDE))


@pytest.fixture(scope="module")
def trainer(base_port: int, engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    with trainer_of(topology_of(recipe(), base_port), engine, tmp_path_factory.mktemp("queue")) as trainer:
        yield trainer


@pytest.fixture
def play(trainer: Trainer, tmp_path: Path) -> Play:
    return Play(trainer, tmp_path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Of each request for a response: whether it is greedy, and for how many candidates it asks."""
    told: list[tuple[bool, int]] = []
    generate = GenerationClient.generate

    async def listening(self, tokens, sampling, **options) -> Completion:
        told.append((sampling.temperature == 0, options.get("candidates", 0)))
        return await generate(self, tokens, sampling, **options)

    monkeypatch.setattr(GenerationClient, "generate", listening)
    return told


def test_rows_arrive_with_candidates_routes_and_the_greedy_reward(play: Play, asked: list[tuple[bool, int]]):
    routes: dict[str, set[str]] = {}

    def script(lead: Lead) -> None:
        queue = lead.trainer.queue
        lead.serve(0)
        lead.gate()
        rows = rows_of(lead.collect())
        lead.trained.batches.append(queue.read(rows))
        for index, uid in enumerate(rows.uids):
            routes[uid] = set()
            for column in ROUTES:
                try:
                    (value,) = queue.read(rows.select([index]), [column])[column].tolist()
                except MissingColumn:
                    continue
                assert value is True
                routes[uid].add(column)
        queue.clear(rows)
        lead.serve(1)
        lead.gate(stop=True)
        lead.end()

    made = recipe()
    trained = play.run(made, script=script)
    (batch,) = trained.batches
    samples, baselines, held_out = [(False, K)] * 12, [(True, 0)] * 6, [(True, 0)] * 8
    assert sorted(asked) == sorted(samples + baselines + held_out)

    check_candidates(batch)
    task, order = load_task(made), DataOrder(16, made.seed)
    examples = [task.train[order.index(position)] for position in batch["position"].tolist()]
    domain_of = {uid: example.info["domain"] for uid, example in zip(batch["uid"], examples, strict=True)}
    assert routes == {uid: {f"route.{domain}"} if domain else set() for uid, domain in domain_of.items()}
    assert set(domain_of.values()) == {"math", "code", None}
    assert {line["uid"]: line.get("route") for line in trained.trajectories} == domain_of
    assert batch["greedy_reward"].tolist() == greedy_lengths(play, made, examples)


def check_candidates(batch: dict[str, Any]) -> None:
    """They stand on what the policy wrote, and a sampled token among them has the log-prob with which it was."""
    per_token = ("tokens", "loss_mask", "rollout_logprobs", "student_topk_ids", "student_topk_logprobs")
    for tokens, mask, sampled, ids, logprobs in zip(*(batch[name] for name in per_token), strict=True):
        assert (ids.dtype, logprobs.dtype) == (torch.int32, torch.float32)
        assert ids.shape == logprobs.shape == (len(tokens), K)
        assert not ids[~mask].any() and not logprobs[~mask].any()
        assert (logprobs.diff(dim=1) <= 0).all() and (logprobs.exp().sum(dim=1)[mask] <= 1 + 1e-5).all()
        among = (ids == tokens[:, None]) & mask[:, None]
        assert among.any() and torch.equal(logprobs[among], sampled[:, None].expand(-1, K)[among])


def greedy_lengths(play: Play, made: Recipe, examples: list[Any]) -> list[float]:
    """The reward of a greedy response to each prompt."""
    chat = Chat(Path(MODEL))

    async def ask() -> list[Completion]:
        async with GenerationClient([play.trainer.engine.url]) as client:
            prompts = [chat.encode(example) for example in examples]
            return await asyncio.gather(*(client.generate(prompt, greedy(made.sampling)) for prompt in prompts))

    return [float(len(chat.decode(done.tokens))) for done in asyncio.run(ask())]


def test_the_greedy_response_takes_room(play: Play):
    made = recipe(evaluate=False, max_in_flight=6)
    chat, task, order = Chat(Path(MODEL)), load_task(made), DataOrder(16, made.seed)
    seen = []

    def script(lead: Lead) -> None:
        lead.serve(0)
        lead.trainer.engine.pause()
        lead.gate()
        lead.until(lambda: len(play.service.pacing.in_flight) == 2)
        room = play.service.room
        seen.append((room.used_samples, room.used_tokens))
        lead.trainer.engine.go_on()
        lead.train()
        lead.gate(stop=True)
        lead.end()

    play.run(made, script=script)
    prompts = [len(chat.encode(task.train[order.index(position)])) for position in (0, 1)]
    assert seen == [(6, sum(3 * (prompt + made.sampling.max_new_tokens) for prompt in prompts))]


def test_a_greedy_response_that_fails_costs_the_group(play: Play, monkeypatch: pytest.MonkeyPatch):
    generate = GenerationClient.generate

    async def no_greedy(self, tokens, sampling, **options) -> Completion:
        if sampling.temperature == 0:
            raise GenerationError("nothing greedy today")
        return await generate(self, tokens, sampling, **options)

    monkeypatch.setattr(GenerationClient, "generate", no_greedy)
    with pytest.raises(NothingSurvives, match=r"generation \(1\)"):
        play.run(recipe(evaluate=False, max_failed_groups=0))
