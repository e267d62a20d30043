"""Which group of prompts may be started now: gates in, positions out.

The data order is cut into batches: batch j is the positions [jP, (j+1)P), with P prompts per batch. Replica i of n owns
the positions p = i mod n. Two paces:

A window of k batches: batch j may start once j - k + 1 batches are retired, which is what gate j - k + 1 says. What is
trained at version j was then written by version j - k + 1 or later. A group that is lost is replaced at once; its
replacement belongs to the same batch, and its position is the replica's next unused one beyond all planned positions
(p >= steps P), that is, a prompt of a later epoch; so is what is started beyond a batch's own positions
(over_sampling), after all of these. Where several batches need groups, the earliest comes first.

No window (None): the trainer takes whatever is complete. A group may start while fewer than (max_staleness + 1) B
samples are alive, started but not retired; positions follow one another, whatever is lost.

Nothing is started that no step would train, nor anything after the stop gate.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meshy.columns import ANY_BATCH


class GateError(RuntimeError):
    """Gates that do not follow one another; the message shows both rows."""


class NothingSurvives(RuntimeError):
    """Too many groups in a row were lost; the message counts the reasons, and shows the rewards of those that the
    filter has dropped."""


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


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What all replicas of a run have in common.

    prompts_per_batch: P; with group_size samples each, a batch is B samples. steps: batches that the run trains.
    window: batches that may be under way at once, at least 1; None for no batches, then max_staleness bounds what is
    alive. over_sampling: how many times P prompts are started for a batch, at least 1; those that end first make it up.
    """

    prompts_per_batch: int
    group_size: int
    steps: int
    window: int | None = 1
    max_staleness: int | None = None
    over_sampling: float = 1.0

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window of {self.window} batches lets nothing start; it must be at least 1")
        if self.window is None and self.max_staleness is None:
            raise ValueError("without a window, max_staleness must bound how old samples may become")
        if not 1 <= self.over_sampling < math.inf or (self.over_sampling > 1 and self.window is None):
            raise ValueError(f"over_sampling of {self.over_sampling} needs a window, and to be at least 1")

    @property
    def batch_size(self) -> int:
        return self.prompts_per_batch * self.group_size

    @property
    def planned(self) -> int:
        """Positions that the run trains if nothing is lost."""
        return self.steps * self.prompts_per_batch


class Pacing:
    """The budget of one replica.

    max_failures, max_filtered: groups that may fail, or be dropped by the filter, in a row. replica, replicas: i and n.
    """

    def __init__(
        self, pace: Pace, *, max_failures: int = 32, max_filtered: int = 256, replica: int = 0, replicas: int = 1
    ) -> None:
        self.pace = pace
        self.max_failures, self.max_filtered = max_failures, max_filtered
        self.gate: Gate | None = None
        self.in_flight: set[Slot] = set()
        self.completed = 0
        self.surplus = 0
        self.failures: Counter[str] = Counter()
        self.filtered: Counter[float] = Counter()  # by mean reward, to tenths
        self._in_a_row = {"failed": 0, "filtered": 0}
        self._budget = (_Windowed if pace.window is not None else _Flowing)(pace, replica, replicas)

    def open(self, gate: Gate) -> None:
        """Take the next gate. GateError where it does not follow the one before."""
        self._check(gate)
        if self.gate is None:  # a run that goes on from a checkpoint begins at a later batch
            self._budget.begin(gate)
        self.gate = gate

    def next(self) -> Slot | None:
        """The next group to start, now in flight; None when the next one needs another gate."""
        if self.gate is None or self.gate.stop:
            return None
        slot = self._budget.next(self.gate)
        if slot is not None:
            self.in_flight.add(slot)
        return slot

    def peek(self) -> int | None:
        """The position that `next` would give."""
        return None if self.gate is None or self.gate.stop else self._budget.peek(self.gate)

    def complete(self, slot: Slot) -> Sequence[Slot]:
        """The group is whole and its rows are to be put. Returns groups in flight that are not needed any more, since
        others have made up their batch; they are forgotten here."""
        self.in_flight.remove(slot)
        self.completed += 1
        self._in_a_row = {"failed": 0, "filtered": 0}
        if not self._budget.completed(slot):
            return ()
        rest = sorted((other for other in self.in_flight if other.batch == slot.batch), key=lambda s: s.position)
        self.in_flight.difference_update(rest)
        self.surplus += len(rest)
        return rest

    def fail(self, slot: Slot, reason: str) -> None:
        """The group is lost; `next` gives its replacement. NothingSurvives when too many were lost in a row."""
        self.failures[reason] += 1
        self._lose(slot, "failed", self.max_failures)

    def drop(self, slot: Slot, mean_reward: float) -> None:
        """The filter does not keep the group; `next` gives its replacement. NothingSurvives when too many in a row were
        dropped."""
        self.filtered[round(mean_reward, 1)] += 1
        self._in_a_row["failed"] = 0
        self._lose(slot, "filtered", self.max_filtered)

    def _lose(self, slot: Slot, how: str, most: int) -> None:
        self.in_flight.remove(slot)
        self._budget.lost(slot)
        self._in_a_row[how] += 1
        if self._in_a_row[how] > most:
            raise NothingSurvives(self._nothing_survives(how, most))

    @property
    def next_position(self) -> int:
        """The first position in the order of the data that is not started yet."""
        return self._budget.next_position

    @property
    def batch(self) -> int:
        """The batch that the newest groups are for."""
        if self.gate is None:
            return 0
        return min(self.gate.samples_retired // self.pace.batch_size + (self.pace.window or 1), self.pace.steps) - 1

    def _nothing_survives(self, how: str, most: int) -> str:
        what = "failed" if how == "failed" else "been dropped by the filter"
        told = f"{self._in_a_row[how]} groups in a row have {what}, more than the {most} allowed; "
        told += f"since the start {self.completed} groups were completed"
        if self.failures:
            reasons = ", ".join(f"{reason} ({count})" for reason, count in self.failures.most_common())
            told += f", {self.failures.total()} failed: {reasons}"
        if self.filtered:
            rows = (
                f"\n  {reward:5.1f} {'#' * min(count, 60)} {count}" for reward, count in sorted(self.filtered.items())
            )
            told += f", {self.filtered.total()} were dropped; groups by mean reward:{''.join(rows)}"
        return told

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


def owned(count: int, replica: int, replicas: int) -> int:
    """How many of the numbers 0 ... count - 1 a replica owns."""
    return max(0, -(-(count - replica) // replicas))


class _Windowed:
    """Batches of planned positions."""

    def __init__(self, pace: Pace, replica: int, replicas: int) -> None:
        self.pace, self.replica, self.replicas = pace, replica, replicas
        self.next_position = replica
        self._replacement = pace.planned + (replica - pace.planned) % replicas
        self._to_replace: list[int] = []  # the batches that need one more group, in order
        self._open: dict[int, int] = {}  # groups that a batch still needs, of those that have begun

    def begin(self, gate: Gate) -> None:
        first = gate.samples_retired // self.pace.batch_size * self.pace.prompts_per_batch
        self.next_position = first + (self.replica - first) % self.replicas

    def peek(self, gate: Gate) -> int | None:
        if self._to_replace:
            return self._replacement
        assert self.pace.window is not None
        batches = min(gate.samples_retired // self.pace.batch_size + self.pace.window, self.pace.steps)
        return self.next_position if self.next_position < batches * self.pace.prompts_per_batch else None

    def next(self, gate: Gate) -> Slot | None:
        position = self.peek(gate)
        if position is None:
            return None
        if self._to_replace:
            self._replacement += self.replicas
            return Slot(position, self._to_replace.pop(0))
        batch = position // self.pace.prompts_per_batch
        self.next_position += self.replicas
        share = self._share(batch)
        self._open.setdefault(batch, share)
        if self.next_position >= (batch + 1) * self.pace.prompts_per_batch:  # that was the last of its own
            for _ in range(self._surplus(share)):
                insort(self._to_replace, batch)
        return Slot(position, batch)

    def _surplus(self, share: int) -> int:
        return math.ceil(share * self.pace.over_sampling - 1e-9) - share  # 10 * 1.1 is a little more than 11

    def _share(self, batch: int) -> int:
        """Positions of a batch that are the replica's own."""
        first, last = (owned((batch + i) * self.pace.prompts_per_batch, self.replica, self.replicas) for i in (0, 1))
        return last - first

    def completed(self, slot: Slot) -> bool:
        """Whether its batch is complete now, as far as this replica makes it up."""
        self._open[slot.batch] -= 1
        if self._open[slot.batch]:
            return False
        del self._open[slot.batch]
        self._to_replace = [batch for batch in self._to_replace if batch != slot.batch]
        return True

    def lost(self, slot: Slot) -> None:
        insort(self._to_replace, slot.batch)


class _Flowing:
    """One position after another, while there is room among what is alive."""

    def __init__(self, pace: Pace, replica: int, replicas: int) -> None:
        self.pace, self.replica, self.replicas = pace, replica, replicas
        self.next_position = replica
        self._started = 0  # groups that are alive or retired, since the run began

    def begin(self, gate: Gate) -> None:
        groups = gate.samples_retired // self.pace.group_size
        self._started = owned(groups, self.replica, self.replicas)
        self.next_position = groups + (self.replica - groups) % self.replicas

    def peek(self, gate: Gate) -> int | None:
        assert self.pace.max_staleness is not None
        alive = (self.pace.max_staleness + 1) * self.pace.batch_size
        dropped = gate.samples_retired - gate.weight_version * self.pace.batch_size
        samples = min(gate.samples_retired + alive, self.pace.steps * self.pace.batch_size + dropped)
        allowed = owned(samples // self.pace.group_size, self.replica, self.replicas)
        return self.next_position if self._started < allowed else None

    def next(self, gate: Gate) -> Slot | None:
        position = self.peek(gate)
        if position is None:
            return None
        self.next_position += self.replicas
        self._started += 1
        return Slot(position, ANY_BATCH)

    def completed(self, slot: Slot) -> bool:
        return False

    def lost(self, slot: Slot) -> None:
        self._started -= 1
