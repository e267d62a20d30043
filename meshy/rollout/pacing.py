"""Which group of prompts may be started now: gates in, positions out.

The data order is cut into batches: batch j is the positions [jP, (j+1)P), with P prompts per batch. With window w,
batch j may start once j - w + 1 batches are retired, which is what gate j - w + 1 says. Replica i of n owns the
positions p = i mod n. Nothing beyond the last batch is ever started, nor anything after the stop gate.

A group that fails is replaced at once, so that a failure never starves the trainer. The replacement belongs to the
batch of the group that it replaces; its position is the replica's next unused one beyond all planned positions
(p >= steps P), that is, a prompt of a later epoch.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass


class GateError(RuntimeError):
    """Gates that do not follow one another; the message shows both rows."""


class NothingSurvives(RuntimeError):
    """Too many groups in a row have failed; the message counts the reasons."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A row of partition `gen_gate`. samples_retired: trained or dropped since the run began."""

    incarnation: str
    gate_step: int
    weight_version: int
    samples_retired: int
    stop: bool = False


@dataclass(frozen=True)
class Slot:
    """A group to generate: its place in the data order, and the batch that it is for."""

    position: int
    batch: int


class Pacing:
    """The budget of one replica.

    prompts_per_batch: P. window: batches that may be under way at once, at least 1. max_failures: groups that may fail
    in a row. replica, replicas: i and n.
    """

    def __init__(
        self,
        *,
        prompts_per_batch: int,
        group_size: int,
        steps: int,
        window: int = 1,
        max_failures: int = 32,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        if window < 1:
            raise ValueError(f"a window of {window} batches lets nothing start; it must be at least 1")
        self.prompts_per_batch = prompts_per_batch
        self.batch_size = prompts_per_batch * group_size
        self.steps = steps
        self.window = window
        self.max_failures = max_failures
        self.replica = replica
        self.replicas = replicas
        self.gate: Gate | None = None
        self.in_flight: set[Slot] = set()
        self.completed = 0
        self.failures: Counter[str] = Counter()
        self._failed_in_a_row = 0
        self._refunds: deque[int] = deque()  # the batches of failed groups that nothing replaces yet
        self._next_planned = replica
        planned = steps * prompts_per_batch
        self._next_replacement = planned + (replica - planned) % replicas

    def open(self, gate: Gate) -> None:
        """Take the next gate. GateError where it does not follow the one before."""
        self._check(gate)
        if self.gate is None:  # a run that goes on from a checkpoint begins at a later batch
            first = gate.samples_retired // self.batch_size * self.prompts_per_batch
            self._next_planned = first + (self.replica - first) % self.replicas
        self.gate = gate

    def next(self) -> Slot | None:
        """The next group to start, now in flight; None when the next one needs another gate."""
        if self.gate is None or self.gate.stop:
            return None
        if self._refunds:
            slot = Slot(self._next_replacement, self._refunds.popleft())
            self._next_replacement += self.replicas
        elif self._next_planned < self.open_batches * self.prompts_per_batch:
            slot = Slot(self._next_planned, self._next_planned // self.prompts_per_batch)
            self._next_planned += self.replicas
        else:
            return None
        self.in_flight.add(slot)
        return slot

    def complete(self, slot: Slot) -> None:
        """The group's rows are in the queue."""
        self.in_flight.remove(slot)
        self.completed += 1
        self._failed_in_a_row = 0

    def fail(self, slot: Slot, reason: str) -> None:
        """The group is lost; `next` gives its replacement. NothingSurvives when too many were lost in a row."""
        self.in_flight.remove(slot)
        self._refunds.append(slot.batch)
        self.failures[reason] += 1
        self._failed_in_a_row += 1
        if self._failed_in_a_row > self.max_failures:
            reasons = ", ".join(f"{reason} ({count})" for reason, count in self.failures.most_common())
            raise NothingSurvives(
                f"{self._failed_in_a_row} groups in a row have failed, more than the {self.max_failures} allowed; "
                f"since the start {self.completed} groups were completed and {self.failures.total()} failed: {reasons}"
            )

    @property
    def open_batches(self) -> int:
        """Batches, counted from the start of the run, whose groups may be started."""
        if self.gate is None:
            return 0
        return min(self.gate.samples_retired // self.batch_size + self.window, self.steps)

    @property
    def next_position(self) -> int:
        """The first planned position that is not started yet."""
        return self._next_planned

    def _check(self, gate: Gate) -> None:
        last = self.gate
        if last is None:
            if gate.gate_step != 0:
                raise GateError(f"the first gate must be step 0 of its incarnation, but it is {gate}")
            return
        if last.incarnation != gate.incarnation:
            what = "the trainer was started anew, which this run cannot follow; start the run again"
        elif gate.gate_step == last.gate_step:
            what = "a gate came twice"
        elif gate.gate_step != last.gate_step + 1:
            what = "the gates are not contiguous"
        elif last.stop:
            what = "a gate came after the last one"
        elif gate.samples_retired < last.samples_retired or gate.weight_version < last.weight_version:
            what = "samples_retired and weight_version never go back"
        else:
            return
        raise GateError(f"{what}: after {last} came {gate}")
