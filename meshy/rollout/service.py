"""The rollout service: it reads gates and, within their budget, turns prompts into rows of partition `train`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshy.columns import EVAL, GEN_GATE, TRAIN
from meshy.data.order import DataOrder
from meshy.data.prompts import Chat, PromptError, PromptTokens
from meshy.generation import GenerationClient
from meshy.importing import load
from meshy.lifetime import former_lives, own_life
from meshy.observe.jsonl import JsonlWriter
from meshy.queue.client import AsyncQueueClient
from meshy.queue.rows import Rows
from meshy.rewards.pool import RewardPool
from meshy.rollout.config import RolloutConfig
from meshy.rollout.engines import replica_metrics, replica_numbers, trouble
from meshy.rollout.evaluation import evaluate
from meshy.rollout.group import Group, GroupFailed, GroupMaker
from meshy.rollout.pacing import Gate, Pace, Pacing, Slot
from meshy.rollout.preflight import load_task
from meshy.rollout.room import Room
from meshy.rollout.rows import group_rows, is_logged, trajectory_lines
from meshy.service import Context, Service
from meshy.service.looped import until_stopped
from meshy.service.tasks import with_task_group


class StaleTokens(RuntimeError):
    """A token was written by an older weight version than the window allows for its batch."""


class RolloutService(Service):
    """One event loop: a task for every group in flight, and the loop over gates.

    A gate is acknowledged once the groups that it allows may start; the last one after the final evaluation, so that
    the trainer, which waits for it, ends the run when everything is there.
    """

    config: RolloutConfig

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        recipe = self.recipe
        config = self.config
        pace = Pace(
            prompts_per_batch=config.prompts_per_batch(recipe),
            group_size=config.group_size,
            steps=recipe.steps,
            window=config.window,
            max_staleness=recipe.max_staleness,
            over_sampling=config.over_sampling,
        )
        self.pacing = Pacing(
            pace,
            max_failures=config.max_failed_groups,
            max_filtered=config.max_filtered_groups,
            replica=context.replica.index,
            replicas=context.group.replicas,
        )
        self.room = Room(config.max_in_flight, config.max_in_flight_tokens)
        self.keep: Callable[[Sequence[float]], bool] | None = load(config.group_filter) if config.group_filter else None
        self._serving: dict[int, asyncio.Task[None]] = {}  # by position
        self._evaluation: asyncio.Task[None] | None = None
        self._to_evaluate: Gate | None = None  # as soon as what is being evaluated is done
        self._startable = asyncio.Event()  # more groups may be started than have been
        self._lost = 0  # groups that gave no rows since the last one that did
        self.evaluating: int | None = None  # the weight version
        self.rows_put = 0
        self._runner = asyncio.Runner()
        self._closing: list[RewardPool | AsyncQueueClient] = []
        self.trajectories: JsonlWriter | None = None
        self.client: GenerationClient | None = None  # once there is work

    # The life of the service ------------------------------------------------------------------------------------------

    def setup(self) -> None:
        self.task = load_task(self.recipe)
        self.order = DataOrder(len(self.task.train), self.recipe.seed)
        self.chat = Chat(self.context.model_folder, self.config.chat_template_options)
        limit = self.recipe.context_length - 1
        self.train_prompts = PromptTokens(self.chat, self.task.train, limit)
        self.eval_prompts = PromptTokens(self.chat, self.task.evaluation, limit)
        self.train_prompts.check_longest()
        self.eval_prompts.check_longest()
        self._runner.run(self._connect())

    async def _connect(self) -> None:
        """Start the reward's workers and reach the queue; what is made here is closed in reverse order."""
        config, context = self.config, self.context
        self.trajectories = JsonlWriter(self._trajectory_file())
        self.pool = RewardPool(
            config.reward or self.task.reward, workers=config.reward_workers, deadline=config.reward_deadline
        )
        self.rows = AsyncQueueClient(
            context.endpoints,
            context.topology.contract,
            context.replica.name,
            life=own_life(),
            former=former_lives(),
        )
        self._closing = [self.pool, self.rows]
        await asyncio.gather(self.pool.start(), self.rows.connect())

    def run(self) -> None:
        if not self.stopping.is_set():
            self._runner.run(until_stopped(self, self._work()))

    def close(self) -> None:
        self._runner.run(self._close())
        self._runner.close()

    async def _close(self) -> None:
        while self._closing:
            await self._closing.pop().close()
        if self.trajectories is not None:
            self.trajectories.close()

    # The work ---------------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        async with self._generation_client() as client:
            self._loop, self.client = asyncio.get_running_loop(), client
            self.maker = GroupMaker(
                client=client,
                pool=self.pool,
                chat=self.chat,
                sampling=self.recipe.sampling,
                context_length=self.recipe.context_length,
                group_size=self.config.group_size,
                seed=self.recipe.seed if self.recipe.deterministic else None,
                deadline=self.config.group_deadline,
                candidates=self.config.candidates,
                baseline=self.config.greedy_baseline,
                route_of=load(self.config.route_by) if self.config.routes else lambda example: None,
                busy=self.timeline.record,
            )
            await with_task_group(self._follow_gates)

    async def _follow_gates(self, groups: asyncio.TaskGroup) -> None:
        self._groups = groups
        starting = groups.create_task(self._start_groups(), name="start groups")
        while True:
            rows = await self.rows.take(GEN_GATE)
            for index, gate in await self._gates_of(rows):
                await self._pass(gate)
                await self.rows.ack(rows.select([index]))
                if gate.stop:
                    starting.cancel()
                    return

    async def _gates_of(self, rows: Rows) -> list[tuple[int, Gate]]:
        """Gates in the order of their steps, each with its place in `rows`."""
        columns: dict[str, Any] = await self.rows.read(rows)
        gates = [
            Gate(
                incarnation=columns["incarnation"][i],
                gate_step=int(columns["gate_step"][i]),
                weight_version=int(columns["weight_version"][i]),
                samples_retired=int(columns["samples_retired"][i]),
                stop=bool(columns["stop"][i]),
            )
            for i in range(len(rows))
        ]
        return sorted(enumerate(gates), key=lambda entry: entry[1].gate_step)

    async def _pass(self, gate: Gate) -> None:
        """Evaluate if this gate asks for it, then start what it allows; all with the gate's weights or later ones."""
        assert self.client is not None
        self.client.require(gate.weight_version)
        if self._evaluates_at(gate):
            if self.config.window == 1 or self.pacing.gate is None or gate.stop:
                await self._evaluate_alone(gate)  # of these weights alone: nothing is trained meanwhile
            else:
                self._evaluate_meanwhile(gate)
        self.pacing.open(gate)
        self._startable.set()

    def _evaluates_at(self, gate: Gate) -> bool:
        if not self.config.evaluate or self.context.replica.index != 0:
            return False
        first, last = self.pacing.gate is None, gate.stop
        if first or last:
            return True
        assert self.pacing.gate is not None
        fresh = gate.weight_version > self.pacing.gate.weight_version
        return fresh and self.config.eval_every > 0 and gate.weight_version % self.config.eval_every == 0

    async def _evaluate_alone(self, gate: Gate) -> None:
        if self._evaluation is not None:
            await self._evaluation
        await self._evaluate(gate)

    def _evaluate_meanwhile(self, gate: Gate) -> None:
        """While groups go on. Where the evaluation before still goes on, this one waits, and the newest that waits is
        made: nothing else waits for evaluations, so they may take longer than `eval_every` versions."""
        if self._to_evaluate is not None:
            self.log.warning(
                "weights v%d are not evaluated: those of v%s still are; raise eval_every, or lower eval_prompts",
                self._to_evaluate.weight_version, self.evaluating,
            )  # fmt: skip
        self._to_evaluate = gate
        if self._evaluation is None or self._evaluation.done():
            self._evaluation = self._groups.create_task(self._evaluate_newest(), name="evaluation")

    async def _evaluate_newest(self) -> None:
        while (gate := self._to_evaluate) is not None:
            self._to_evaluate = None
            await self._evaluate(gate)

    async def _evaluate(self, gate: Gate) -> None:
        self.evaluating = gate.weight_version
        result = await evaluate(self.maker, self.eval_prompts, self.config.eval_prompts, gate.weight_version)
        self.log.info("weights v%d: accuracy %.3f", result.weight_version, result.accuracy)
        await self.rows.put(EVAL, result.row(gate.gate_step))
        self.evaluating = None

    async def _start_groups(self) -> None:
        """Start the groups that the gates and what is in flight allow, whenever there may be more of them. One after
        another: the requests of each are on their way before the next is begun, so that the engines have work at
        once."""
        while True:
            await self._startable.wait()
            self._startable.clear()
            while (position := self.pacing.peek()) is not None and self._take_room(position):
                slot = self.pacing.next()
                assert slot is not None and slot.position == position
                self._serving[position] = self._groups.create_task(self._serve(slot), name=f"group {position}")
                await asyncio.sleep(0)

    def _take_room(self, position: int) -> bool:
        samples = self.config.responses_per_group
        try:
            prompt = len(self.train_prompts[self.order.index(position)])
        except PromptError:
            prompt = 0  # it will fail by itself
        tokens = samples * min(prompt + self.recipe.sampling.max_new_tokens, self.recipe.context_length)
        if not self.room.fits(samples, tokens):
            return False
        self.room.take(position, samples, tokens)
        return True

    async def _serve(self, slot: Slot) -> None:
        """One group, from its prompt to its rows; replaced at once if it gives none."""
        try:
            group = await self._make(slot)
        except GroupFailed as failure:
            if slot not in self.pacing.in_flight:
                return  # given up at the same moment
            self.log.warning("group %d (batch %d) is replaced: %s", slot.position, slot.batch, failure)
            self._lost += 1
            self.pacing.fail(slot, failure.reason)
            group = None
        finally:
            self._end(slot)
        if group is not None and not self._keeps(group):
            self._lost += 1
            self.pacing.drop(slot, sum(sample.reward for sample in group.samples) / len(group.samples))
            group = None
        if group is None:
            self._startable.set()
            return
        self._check_versions(group, slot)
        for other in self.pacing.complete(slot):
            task = self._serving[other.position]
            self._end(other)  # here: a task that has not begun is never told that it is cancelled
            task.cancel()
        self._startable.set()
        lost, self._lost = self._lost, 0
        await self.rows.put(TRAIN, group_rows(group, slot.batch, lost))
        self.rows_put += len(group.samples)
        if self.trajectories is not None and is_logged(slot.position, self.config.log_trajectories):
            for line in trajectory_lines(group, slot.batch):
                self.trajectories.write(line)

    def _end(self, slot: Slot) -> None:
        """The group is generated, or given up: others may have its room."""
        if self._serving.pop(slot.position, None) is not None:
            self.room.leave(slot.position)

    async def _make(self, slot: Slot) -> Group:
        row = self.order.index(slot.position)
        try:
            prompt = self.train_prompts[row]
        except PromptError as error:
            raise GroupFailed("prompt", str(error)) from error
        return await self.maker.make(slot.position, self.task.train[row], prompt)

    def _keeps(self, group: Group) -> bool:
        return self.keep is None or bool(self.keep([sample.reward for sample in group.samples]))

    def _check_versions(self, group: Group, slot: Slot) -> None:
        """A window is exact: batch j is trained at version j, and no token of it is older than the window allows."""
        if self.config.window is None:
            return
        oldest, newest = slot.batch - self.config.window + 1, slot.batch
        for sample in group.responses:
            versions = sample.episode.written_versions
            if min(versions) < oldest or max(versions) > newest:
                raise StaleTokens(
                    f"group {group.position} holds tokens written by weight versions {sorted(versions)}, but a window "
                    f"of {self.config.window} allows {max(oldest, 0)} to {newest} in batch {slot.batch}: a gate must "
                    f"come after {self.config.inference!r} serves its version"
                )

    # What it is made of -----------------------------------------------------------------------------------------------

    def _generation_client(self) -> GenerationClient:
        return GenerationClient(
            self.context.topology.urls(self.config.inference),
            vocab_size=self.chat.vocab_size,
            deadline=self.config.request_deadline,
            max_in_flight_per_replica=self.config.max_in_flight_per_engine,
            restart_interrupted=self.config.interrupted == "restart",
        )

    def _trajectory_file(self) -> Path:
        index, file = self.context.replica.index, self.context.folder.trajectories
        return file if index == 0 else file.with_suffix(f".{index}.jsonl")

    @property
    def doing(self) -> str:
        if self.evaluating is not None:
            return f"evaluating weights v{self.evaluating}"
        return f"generating batch {self.pacing.batch}" if self.pacing.in_flight else "waiting for a gate"

    def health(self) -> dict[str, Any]:
        about: dict[str, Any] = {
            "doing": self.doing,
            "gate_step": -1 if self.pacing.gate is None else self.pacing.gate.gate_step,
            "groups_in_flight": len(self.pacing.in_flight),
            "groups_completed": self.pacing.completed,
            "groups_failed": dict(self.pacing.failures),
            "groups_filtered": dict(self.pacing.filtered),
            "groups_given_up": self.pacing.surplus,
            "tokens_in_flight": self.room.used_tokens,
            "next_position": self.pacing.next_position,
        }
        if self.client is not None:
            about["inference"] = replica_numbers(self.client)
            if self.state == "ready" and (told := trouble(self.client)):
                about["detail"] = told
        return about

    def metrics(self) -> dict[str, float]:
        failures = dict(self.pacing.failures)  # a copy: this is another thread than the loop's
        seen = {} if self.client is None else replica_metrics(self.client, self._loop)
        return {
            "rollout/groups_in_flight": len(self.pacing.in_flight),
            "rollout/groups_completed": self.pacing.completed,
            "rollout/groups_failed": sum(failures.values()),
            "rollout/groups_filtered": sum(dict(self.pacing.filtered).values()),
            "rollout/groups_given_up": self.pacing.surplus,
            "rollout/samples_in_flight": self.room.used_samples,
            "rollout/tokens_in_flight": self.room.used_tokens,
            "rollout/rows": self.rows_put,
            **{f"rollout/failed/{reason.replace(' ', '_')}": count for reason, count in failures.items()},
            **seen,
        }
