"""Who runs: a queue of waiting requests and a list of running ones, whose index is their slot in the cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from meshy.inference.embedded.request import Request


class Plan(NamedTuple):
    """One step: `decode[i]` holds slot i and adds one token; `prefill` takes the slots after them, whole."""

    decode: list[Request]
    prefill: list[Request]
    moves: list[tuple[int, int]]  # (from slot, to slot), to be done first


class Scheduler:
    """Continuous batching: a slot is taken again as soon as its request has ended."""

    def __init__(self, max_running: int, max_prefill_tokens: int) -> None:
        self.max_running = max_running
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, requests: Iterable[Request]) -> None:
        self.waiting.extend(requests)

    def plan(self) -> Plan:
        """Close the gaps that ended requests left, then admit waiting ones while slots and prefill budget last."""
        moves = self._compact()
        decode = self.running
        prefill: list[Request] = []
        budget = self.max_prefill_tokens
        while self.waiting and len(decode) + len(prefill) < self.max_running:
            budget -= self.waiting[0].length
            if budget < 0 and prefill:
                break
            prefill.append(self.waiting.popleft())
        self.running = decode + prefill
        return Plan(decode, prefill, moves)

    def _compact(self) -> list[tuple[int, int]]:
        """Fill each ended request's slot with the last living one, so that the running slots are 0..n-1."""
        running, moves = self.running, []
        slot = 0
        while slot < len(running):
            if not running[slot].finished:
                slot += 1
                continue
            last = running.pop()
            if slot < len(running):
                if not last.finished:
                    moves.append((len(running), slot))
                running[slot] = last
        return moves

    def retract(self) -> list[Request]:
        """Send all running requests back to the head of the queue, to be prefilled with what they have written."""
        retracted = [request for request in self.running if not request.finished]
        for request in retracted:
            request.retractions += 1
        self.waiting.extendleft(reversed(retracted))
        self.running = []
        return retracted

    def remove(self, match: set[str] | None) -> tuple[list[Request], list[Request]]:
        """Take out the requests with these ids (None: all). Returns (were running, were waiting)."""
        running = [r for r in self.running if not r.finished and (match is None or r.rid in match)]
        waiting = [r for r in self.waiting if match is None or r.rid in match]
        if waiting:
            gone = set(map(id, waiting))
            self.waiting = deque(r for r in self.waiting if id(r) not in gone)
        return running, waiting
