"""The wall time that each pace setting can reach at best: generation and training as pure arithmetic, no overheads.

Engines of some slots each; a response of n tokens takes a slot for n decode steps, and a step takes the same time
whatever the number of running responses. A slot that becomes free is taken again at once, and a response that finds a
free slot begins at once. The trainer takes whole groups and a fixed time per token; after each batch it publishes,
which costs nothing, and generation goes on meanwhile, by the new weights.

    window k    batch j is the groups [jP, (j+1)P), which may start once j - k + 1 batches are retired; batches are
                trained in order.
    window None a group may start while started and not retired samples are fewer than (max_staleness + 1) batches; it
                is dropped if it holds a token that is more than max_staleness versions old when it would be trained.
                What is dropped is retired at once and replaced.
    stream      an optimiser mini-batch is trained as soon as enough groups (of its batch, for window k) are complete,
                instead of waiting for the whole batch.

Of what is complete, groups with the oldest token are trained first, then those that were complete first.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Setting:
    """batch_size, group_size, max_in_flight (of all engines), max_in_flight_per_engine: samples. step_seconds: of a
    decode step. token_seconds: of training, per written token.

    max_in_flight_per_engine: what is started beyond it waits in one line for whichever engine is free first; None: it
    waits in the line of the engine that had the fewest requests when it was started.
    """

    batches: int
    batch_size: int
    group_size: int = 1
    engines: int = 1
    slots: int = 32
    step_seconds: float = 1.0
    token_seconds: float = 0.0
    window: int | None = 1
    max_staleness: int | None = None
    stream: bool = False
    mini_batches: int = 1
    max_in_flight: int | None = None
    max_in_flight_per_engine: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size % self.group_size:
            raise ValueError(f"a batch of {self.batch_size} does not divide into groups of {self.group_size}")
        if self.batch_size % (self.mini_batches * self.group_size):
            raise ValueError(f"{self.mini_batches} mini-batches do not divide the groups of a batch evenly")
        if self.window is None and self.max_staleness is None:
            raise ValueError("window None needs max_staleness")
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window of {self.window} batches lets nothing start")
        if self.window is not None and self.max_staleness is not None and self.max_staleness < self.window - 1:
            raise ValueError(f"max_staleness {self.max_staleness} is below window - 1")
        if self.max_in_flight is not None and self.max_in_flight < self.group_size:
            raise ValueError(f"max_in_flight {self.max_in_flight} has no room for a group of {self.group_size}")

    @property
    def groups_per_batch(self) -> int:
        return self.batch_size // self.group_size

    @property
    def groups_per_unit(self) -> int:
        """What the trainer takes at once."""
        return self.groups_per_batch // (self.mini_batches if self.stream else 1)


@dataclass(slots=True)
class Sample:
    """One response; moments in seconds since the run began.

    sent: given to rollout's client. started: its first decode step. version: of the weights that wrote its first token.
    finished: its last token. trained: its training began, at weight version `trained_version`; None where it never was.
    """

    length: int
    sent: float
    engine: int = -1
    started: float | None = None
    version: int = -1
    finished: float | None = None
    trained: float | None = None
    trained_version: int | None = None

    @property
    def age(self) -> int | None:
        """Of its oldest token at training, in versions."""
        return None if self.trained_version is None else self.trained_version - self.version


@dataclass(slots=True)
class _Engine:
    in_flight: int = 0
    running: int = 0
    line: deque[int] = field(default_factory=deque)


@dataclass(frozen=True)
class Outcome:
    """seconds: until the last batch is trained. samples: by number; number i is of group i // group_size. published:
    when each version was, version 1 first. dropped: samples. most_live: samples started and not retired, at most."""

    seconds: float
    samples: Sequence[Sample]
    published: Sequence[float]
    dropped: int
    most_live: int
    setting: Setting

    @property
    def samples_per_second(self) -> float:
        return self.setting.batches * self.setting.batch_size / self.seconds

    @property
    def ages(self) -> list[int]:
        return [sample.age for sample in self.samples if sample.age is not None]

    @property
    def busy_slots(self) -> float:
        """The share of the slots' time in which they decoded."""
        tokens = sum(sample.length for sample in self.samples if sample.finished is not None)
        slots = self.setting.engines * self.setting.slots
        return tokens * self.setting.step_seconds / (slots * self.seconds)

    @property
    def busy_trainer(self) -> float:
        tokens = sum(sample.length for sample in self.samples if sample.trained is not None)
        return tokens * self.setting.token_seconds / self.seconds


def simulate(setting: Setting, length: Callable[[int], int]) -> Outcome:
    """A whole run. length: tokens of each sample, by number; groups that replace dropped ones have the numbers after
    those of the last batch."""
    return _Run(setting, length).run()


_FINISHED, _TRAINED = 0, 1


class _Run:
    def __init__(self, setting: Setting, length: Callable[[int], int]) -> None:
        self.setting, self.length = setting, length
        self.now = 0.0
        self.events: list[tuple[float, int, int]] = []  # (when, kind, sample)
        self.samples: list[Sample] = []
        self.engines = [_Engine() for _ in range(setting.engines)]
        self.line: deque[int] = deque()  # started, given to no engine yet
        self.missing: list[int] = []  # samples of each group that are not finished
        self.groups_in_flight = 0
        self.ready: dict[int, deque[int]] = {}  # complete groups by batch, as they became complete; None has one batch
        self.training: list[int] | None = None  # groups
        self.taken = 0  # groups of the batch under way that are trained or being trained
        self.version = 0
        self.retired = 0
        self.dropped = 0
        self.most_live = 0
        self.published: list[float] = []

    def run(self) -> Outcome:
        self._react()
        while self.version < self.setting.batches:
            if not self.events:
                raise RuntimeError(f"nothing goes on at {self.now} s: batch {self.version} never gets complete")
            self.now = self.events[0][0]
            while self.events and self.events[0][0] == self.now:
                _, kind, sample = heapq.heappop(self.events)
                if kind == _FINISHED:
                    self._finished(sample)
                else:
                    self._trained()
            self._react()
        return Outcome(self.now, self.samples, self.published, self.dropped, self.most_live, self.setting)

    def _react(self) -> None:
        """Start, place and train what can be by now."""
        while True:
            self._start_groups()
            self._place()
            if not self._train():
                return

    # Generation -------------------------------------------------------------------------------------------------------

    def _start_groups(self) -> None:
        size = self.setting.group_size
        while self._may_start():
            first = len(self.samples)
            self.samples += [Sample(self.length(i), self.now) for i in range(first, first + size)]
            self.line.extend(range(first, first + size))
            self.missing.append(size)
            self.groups_in_flight += 1
            self.most_live = max(self.most_live, len(self.samples) - self.retired)

    def _may_start(self) -> bool:
        setting, groups = self.setting, len(self.missing)
        size = setting.group_size
        if setting.max_in_flight is not None and (self.groups_in_flight + 1) * size > setting.max_in_flight:
            return False
        if setting.window is not None:
            open_batches = min(self.retired // setting.batch_size + setting.window, setting.batches)
            return groups < open_batches * setting.groups_per_batch
        assert setting.max_staleness is not None
        if groups * size >= setting.batches * setting.batch_size + self.dropped:
            return False
        return (groups + 1) * size - self.retired <= (setting.max_staleness + 1) * setting.batch_size

    def _place(self) -> None:
        """To the engine with the fewest requests; then first come, first served."""
        limit = self.setting.max_in_flight_per_engine
        while self.line:
            index = min(range(len(self.engines)), key=lambda i: self.engines[i].in_flight)
            engine = self.engines[index]
            if limit is not None and engine.in_flight >= limit:
                break
            sample = self.line.popleft()
            self.samples[sample].engine = index
            engine.in_flight += 1
            engine.line.append(sample)
        for engine in self.engines:
            while engine.line and engine.running < self.setting.slots:
                self._decode(engine, engine.line.popleft())

    def _decode(self, engine: _Engine, number: int) -> None:
        sample = self.samples[number]
        sample.started, sample.version = self.now, self.version
        engine.running += 1
        heapq.heappush(self.events, (self.now + sample.length * self.setting.step_seconds, _FINISHED, number))

    def _finished(self, number: int) -> None:
        sample = self.samples[number]
        sample.finished = self.now
        engine = self.engines[sample.engine]
        engine.running -= 1
        engine.in_flight -= 1
        group = number // self.setting.group_size
        self.missing[group] -= 1
        if self.missing[group] == 0:
            self.groups_in_flight -= 1
            batch = 0 if self.setting.window is None else group // self.setting.groups_per_batch
            self.ready.setdefault(batch, deque()).append(group)

    # Training ---------------------------------------------------------------------------------------------------------

    def _train(self) -> bool:
        """Begin what can be trained now. Whether something was dropped, so that more may start."""
        if self.training is not None or self.version == self.setting.batches:
            return False
        ready = self.ready.setdefault(0 if self.setting.window is None else self.version, deque())
        dropped = self._drop(ready)
        if len(ready) >= self.setting.groups_per_unit:
            self.training = sorted(ready, key=self._oldest)[: self.setting.groups_per_unit]
            for group in self.training:
                ready.remove(group)
            members = [sample for group in self.training for sample in self._members(group)]
            for sample in members:
                sample.trained, sample.trained_version = self.now, self.version
            seconds = sum(sample.length for sample in members) * self.setting.token_seconds
            heapq.heappush(self.events, (self.now + seconds, _TRAINED, -1))
        return dropped

    def _drop(self, ready: deque[int]) -> bool:
        """Let go of groups with a token that is too old."""
        oldest = self.version - (self.version if self.setting.max_staleness is None else self.setting.max_staleness)
        fresh = [group for group in ready if self._oldest(group) >= oldest]
        lost = (len(ready) - len(fresh)) * self.setting.group_size
        if lost:
            ready.clear()
            ready.extend(fresh)
            self.dropped += lost
            self.retired += lost
        return lost > 0

    def _oldest(self, group: int) -> int:
        return min(sample.version for sample in self._members(group))

    def _members(self, group: int) -> list[Sample]:
        size = self.setting.group_size
        return self.samples[group * size : (group + 1) * size]

    def _trained(self) -> None:
        assert self.training is not None
        self.taken += len(self.training)
        self.training = None
        if self.taken == self.setting.groups_per_batch:
            self.taken = 0
            self.version += 1
            self.retired += self.setting.batch_size
            self.published.append(self.now)
