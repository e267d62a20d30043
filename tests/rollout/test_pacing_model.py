"""Pacing against a brute-force model: what may be started is worked out anew from scratch at every turn."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshy.columns import ANY_BATCH
from meshy.rollout.pacing import Pace, Pacing, Slot
from tests.rollout.test_pacing import gate

OVER_SAMPLING = (Fraction(1), Fraction(11, 10), Fraction(3, 2), Fraction(2))
TURNS = 300  # then everything runs to its end


@dataclass
class World:
    """All replicas of rollout, and a trainer: what has happened to every group, by position.

    over: over_sampling, without a rounding error. resumed: batches that an earlier run has trained.
    """

    pace: Pace
    over: Fraction
    replicas: int
    resumed: int
    started: dict[int, Slot] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    done: list[int] = field(default_factory=list)  # in the order of their completion
    surplus: set[int] = field(default_factory=set)
    trained: list[list[int]] = field(default_factory=list)
    stale: set[int] = field(default_factory=set)
    gates: int = 0

    def __post_init__(self) -> None:
        bounds = {"max_failures": 10**6, "max_filtered": 10**6, "replicas": self.replicas}
        self.paces = [Pacing(self.pace, replica=i, **bounds) for i in range(self.replicas)]
        self.open_gate()

    # What is so -------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self.resumed + len(self.trained)

    @property
    def ended(self) -> bool:
        return self.version == self.pace.steps

    @property
    def waiting(self) -> list[int]:
        """Groups that the trainer has got and not trained."""
        gone = self.stale.union(*self.trained)
        return [p for p in self.done if p not in gone]

    def in_flight(self, replica: int) -> list[int]:
        gone = self.lost.union(self.done, self.surplus)
        return [p for p in sorted(self.started) if p % self.replicas == replica and p not in gone]

    def share(self, batch: int, replica: int) -> list[int]:
        """The planned positions of a batch that a replica owns."""
        size = self.pace.prompts_per_batch
        return [p for p in range(batch * size, (batch + 1) * size) if p % self.replicas == replica]

    def expected(self, replica: int) -> Slot | None:
        """What the replica must start next."""
        if self.gates and self.ended:
            return None
        return self._expected_of_window(replica) if self.pace.window else self._expected_in_flow(replica)

    def _expected_of_window(self, replica: int) -> Slot | None:
        assert self.pace.window is not None
        batches = range(self.resumed, min(self.version + self.pace.window, self.pace.steps))
        mine = [slot for slot in self.started.values() if slot.position % self.replicas == replica]
        for batch in batches:
            own = self.share(batch, replica)
            of_batch = [slot.position for slot in mine if slot.batch == batch]
            if len(set(of_batch) & set(self.done)) == len(own):
                continue
            owed = len(self.lost & set(of_batch)) + len(own)  # all that must have been started by now
            if set(own) <= self.started.keys():
                owed += math.ceil(len(own) * self.over) - len(own)
            begun = [p for p in own if p in self.started]
            if len(of_batch) < owed - (len(own) - len(begun)):
                beyond = [slot.position for slot in mine if slot.position >= self.pace.planned]
                first = self.pace.planned + (replica - self.pace.planned) % self.replicas
                return Slot(max(beyond, default=first - self.replicas) + self.replicas, batch)
        free = [p for batch in batches for p in self.share(batch, replica) if p not in self.started]
        return Slot(free[0], free[0] // self.pace.prompts_per_batch) if free else None

    def _expected_in_flow(self, replica: int) -> Slot | None:
        assert self.pace.max_staleness is not None
        size, retired = self.pace.prompts_per_batch, self.version * self.pace.prompts_per_batch + len(self.stale)
        most = min(retired + (self.pace.max_staleness + 1) * size, self.pace.planned + len(self.stale))
        allowed = sum(group % self.replicas == replica for group in range(most))
        before = self.resumed * size
        mine = [p for p in self.started if p % self.replicas == replica]
        used = sum(group % self.replicas == replica for group in range(before)) + len(mine)
        if used - sum(p % self.replicas == replica for p in self.lost) >= allowed:
            return None
        first = before + (replica - before) % self.replicas
        return Slot(max(mine, default=first - self.replicas) + self.replicas, ANY_BATCH)

    # What may happen --------------------------------------------------------------------------------------------------

    def open_gate(self) -> None:
        samples = self.version * self.pace.batch_size + len(self.stale) * self.pace.group_size
        for pacing in self.paces:
            pacing.open(gate(self.gates, samples, version=self.version, stop=self.ended))
        self.gates += 1

    def start(self, replica: int) -> bool:
        expected = self.expected(replica)
        peeked = self.paces[replica].peek()
        slot = self.paces[replica].next()
        assert slot == expected and peeked == (None if slot is None else slot.position)
        if slot is None:
            return False
        assert slot.position not in self.started and slot.position % self.replicas == replica
        self.started[slot.position] = slot
        self.check_bounds(slot)
        return True

    def check_bounds(self, slot: Slot) -> None:
        if self.pace.window is not None:
            assert self.version <= slot.batch < min(self.version + self.pace.window, self.pace.steps)
            return
        assert self.pace.max_staleness is not None
        gone = self.lost.union(self.stale, *self.trained)
        alive = (len(self.started) - len(gone)) * self.pace.group_size
        assert alive <= (self.pace.max_staleness + 1) * self.pace.batch_size

    def end(self, position: int, how: str) -> None:
        slot, pacing = self.started[position], self.paces[position % self.replicas]
        if how == "failed":
            self.lost.add(position)
            pacing.fail(slot, "generation")
        elif how == "filtered":
            self.lost.add(position)
            pacing.drop(slot, 1.0)
        else:
            self.done.append(position)
            given_up = {other.position for other in pacing.complete(slot)}
            complete = sum(
                self.started[p].batch == slot.batch and p % self.replicas == position % self.replicas for p in self.done
            )
            if slot.batch != ANY_BATCH and complete == len(self.share(slot.batch, position % self.replicas)):
                mine = self.in_flight(position % self.replicas)
                assert given_up == {p for p in mine if self.started[p].batch == slot.batch}
            else:
                assert not given_up
            self.surplus |= given_up

    def train(self) -> bool:
        """One step, if its groups are there."""
        mine = [p for p in self.waiting if self.started[p].batch in (self.version, ANY_BATCH)]
        if self.ended or len(mine) < self.pace.prompts_per_batch:
            return False
        assert self.pace.window is None or len(mine) == self.pace.prompts_per_batch
        self.trained.append(mine[: self.pace.prompts_per_batch])
        self.open_gate()
        return True

    def drop_stale(self, position: int) -> None:
        self.stale.add(position)
        self.open_gate()

    def check_end(self) -> None:
        assert all(pacing.next() is None and pacing.peek() is None for pacing in self.paces)
        assert not any(pacing.in_flight for pacing in self.paces) and not self.waiting
        used = [p for batch in self.trained for p in batch]
        assert len(used) == len(set(used)) == (self.pace.steps - self.resumed) * self.pace.prompts_per_batch
        assert sum(pacing.completed for pacing in self.paces) == len(used) + len(self.stale)
        assert sum(pacing.surplus for pacing in self.paces) == len(self.surplus)
        if self.pace.window is not None:
            for batch, positions in enumerate(self.trained, self.resumed):
                owners = Counter(p % self.replicas for p in positions)
                assert owners == Counter(p % self.replicas for i in range(self.replicas) for p in self.share(batch, i))
                if self.over == 1 and not self.lost:
                    assert sorted(positions) == sorted(p for i in range(self.replicas) for p in self.share(batch, i))


def play(world: World, data: st.DataObject, losses: int) -> None:
    """Any order of starts, ends, losses and steps; at last everything runs to its end."""
    for turn in range(10**6):
        if world.ended:
            return
        drawn = turn < TURNS
        what = data.draw(st.sampled_from(("start", "start", "end", "end", "train", "stale"))) if drawn else "all"
        if what in ("start", "all"):
            replica = data.draw(st.integers(0, world.replicas - 1)) if drawn else turn % world.replicas
            world.start(replica)
        if what in ("end", "all"):
            running = [p for i in range(world.replicas) for p in world.in_flight(i)]
            if running:
                how = data.draw(st.sampled_from(("done", "failed", "filtered"))) if losses and drawn else "done"
                losses -= how != "done"
                world.end(data.draw(st.sampled_from(running)) if drawn else running[0], how)
        if what == "stale" and world.pace.window is None and losses and world.waiting:
            losses -= 1
            world.drop_stale(data.draw(st.sampled_from(world.waiting)))
        if what in ("train", "all"):
            world.train()
    raise AssertionError("the run does not end")


def world_of(data: st.DataObject, **fields) -> World:
    steps = data.draw(st.integers(1, 4), "steps")
    over = fields.pop("over", Fraction(1))
    pace = Pace(
        prompts_per_batch=data.draw(st.integers(1, 5), "prompts"),
        group_size=data.draw(st.integers(1, 3), "group_size"),
        steps=steps,
        over_sampling=float(over),
        **fields,
    )
    return World(
        pace, over, data.draw(st.integers(1, 4), "replicas"), resumed=data.draw(st.integers(0, steps - 1), "resumed")
    )


FAST = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@FAST
@given(data=st.data())
def test_windows_of_1_to_3_batches(data: st.DataObject):
    over = data.draw(st.sampled_from(OVER_SAMPLING), "over_sampling")
    world = world_of(data, window=data.draw(st.integers(1, 3), "window"), over=over)
    play(world, data, data.draw(st.integers(0, 6), "losses"))
    world.check_end()


@FAST
@given(data=st.data())
def test_no_window(data: st.DataObject):
    world = world_of(data, window=None, max_staleness=data.draw(st.integers(0, 3), "max_staleness"))
    play(world, data, data.draw(st.integers(0, 6), "losses"))
    world.check_end()
