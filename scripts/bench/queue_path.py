"""The queue's part of a step's critical path: from the last group's put until every trainer rank holds its rows.

    python scripts/bench/queue_path.py [--rounds 10] [--whole 3] [--only 128x512]

Two trainer ranks in processes of their own, as the trainer runs them: the first gathers (Collector), plans and commands
over the crew's line, both fetch (Fetcher). Groups of 8 rows that came earlier were fetched early; the clock runs from
the start of the last one's put. Bar: p50 <= 40 ms for each size.

Reported beside it: a whole batch that is put at once and fetched by both ranks, over the time in which pickle and one
ZeroMQ socket bring the same rows from one process to another, row by row and as one tensor a column. The queue moves
them twice, and may be read by others. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import pickle
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import zmq
from torch.distributed import TCPStore

from meshy.columns import TRAIN, TRAIN_COLUMNS, Consumes, Contract, Produces
from meshy.contract import Declaration, derive_contract
from meshy.queue.endpoints import Endpoints
from meshy.queue.local import free_ports, local_queue
from meshy.queue.rows import Rows
from meshy.queue.sync import QueueClient
from meshy.spmd.crew import Crew
from meshy.spmd.fetch import Fetcher, FetchRows
from meshy.training.batch import RANK_COLUMNS
from meshy.training.collect import Collector
from meshy.training.commands import TrainBatch
from meshy.training.plan import Shares, plan_mini_batch

HOST = "127.0.0.1"
RANKS, GROUP = 2, 8
SIZES = ((128, 512), (512, 4096), (2048, 4096))
BAR_MS = 40.0
SECONDS = 120.0


def contract_of() -> Contract:
    contract, faults = derive_contract(
        [
            Declaration("rollout", 1, (), (Produces(TRAIN, TRAIN_COLUMNS, creates=True),), {TRAIN: 4096}),
            Declaration("trainer", 1, (Consumes(TRAIN, TRAIN_COLUMNS, end=True),), ()),
        ]
    )
    assert not faults, faults
    return contract


# A trainer rank ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settle:
    """Say when everything that was wanted has been read."""


class Rank:
    def __init__(self, rank: int, pipe: Connection, endpoints: Endpoints, contract: Contract, port: int) -> None:
        self.rank, self.pipe = rank, pipe
        self.queue = QueueClient(endpoints, contract, "trainer.0")
        self.fetcher = Fetcher(self.queue, RANK_COLUMNS)
        store = TCPStore(HOST, port, is_master=rank == 0)
        self.crew = Crew(rank, RANKS, HOST, store, on_aside=self.aside)

    def aside(self, order: FetchRows) -> None:
        self.fetcher.want(order.rows.select([i for i, rank in enumerate(order.ranks) if rank == self.rank]))

    def execute(self, command: Settle | TrainBatch) -> None:
        if isinstance(command, Settle):
            with self.fetcher._changed:
                assert self.fetcher._changed.wait_for(lambda: not self.fetcher._coming, SECONDS)
            return
        mine = sorted(set().union(*(plan.samples(self.rank) for plan in command.plans)))
        self.fetcher.get(command.rows.select(mine))
        self.pipe.send(time.perf_counter())
        self.fetcher.forget(command.rows.uids)

    def command(self, command: Settle | TrainBatch) -> None:
        self.crew.send(command)
        self.execute(command)
        self.crew.wait_for_all("hold their rows")

    def follow(self) -> None:
        while (command := self.crew.receive()) is not None:
            self.execute(command)
            self.crew.confirm()

    def lead(self) -> None:
        shares = Shares(RANKS, by_name=False)

        def share(rows: Rows, lengths: list[int]) -> list[int]:
            ranks = [shares.rank_of(uid, length) for uid, length in zip(rows.uids, lengths, strict=True)]
            order = FetchRows(rows, tuple(ranks))
            self.crew.send_aside(order)
            self.aside(order)
            return ranks

        collector = Collector(self.queue, share=share)
        while (round := self.pipe.recv()) is not None:
            version, count, early = round
            wait_for_rows(collector, early)
            self.command(Settle())
            self.pipe.send("early")
            batch = collector.collect(version, count)
            plan = plan_mini_batch(
                range(count),
                batch.lengths,
                batch.written,
                world_size=RANKS,
                tokens_per_micro_batch=16384,
                packed=True,
                ranks=batch.ranks,
            )
            self.command(TrainBatch(batch.rows, (0.0,) * count, (0.0,) * count, (plan,), 1, (0.0,), version))
            self.queue.clear(batch.rows)
            self.pipe.send("cleared")
        self.crew.send(None)
        collector.close()


def wait_for_rows(collector: Collector, count: int) -> None:
    with collector._changed:
        assert collector._changed.wait_for(lambda: collector._inbox.samples >= count, SECONDS)


def run_rank(rank: int, pipe: Connection, endpoints: Endpoints, contract: Contract, port: int) -> None:
    member = Rank(rank, pipe, endpoints, contract, port)
    if rank == 0:
        member.lead()
    else:
        member.follow()
    member.fetcher.close()
    member.crew.close()
    member.queue.close()


@contextmanager
def trainer(endpoints: Endpoints, contract: Contract) -> Iterator[list[Connection]]:
    """A pipe to each rank."""
    spawn = multiprocessing.get_context("spawn")
    (port,) = free_ports(1)
    pipes = [spawn.Pipe() for _ in range(RANKS)]
    ranks = [
        spawn.Process(target=run_rank, args=(rank, theirs, endpoints, contract, port))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    try:
        yield [ours for ours, _ in pipes]
        pipes[0][0].send(None)
        for process in ranks:
            process.join(SECONDS)
    finally:
        for process in ranks:
            process.kill()


# Rollout -------------------------------------------------------------------------------------------------------------


def lengths_of(rows: int, tokens: int) -> list[int]:
    """Half to one and a half times `tokens`, in the mean as many."""
    generator = torch.Generator().manual_seed(rows)
    half = torch.randint(tokens // 2, tokens, (rows // 2,), generator=generator)
    return torch.cat((half, 2 * tokens - half)).tolist()


def columns_of(positions: range, lengths: Sequence[int], start: int, batch: int) -> dict[str, list[Any]]:
    """Whole groups; uids and positions are those of batch `batch` alone."""
    n, now = len(lengths), time.time()
    groups = [position for position in positions for _ in range(GROUP)]
    return {
        "uid": [f"{batch}.{start + i}" for i in range(n)],
        "prompt_id": [f"p{position}" for position in groups],
        "group_id": [f"{batch}.{position}" for position in groups],
        "group_size": [GROUP] * n,
        "position": groups,
        "batch": [batch] * n,
        "tokens": [torch.zeros(length, dtype=torch.int64) for length in lengths],
        "loss_mask": [torch.ones(length, dtype=torch.bool) for length in lengths],
        "rollout_logprobs": [torch.zeros(length) for length in lengths],
        "token_versions": [torch.zeros(length, dtype=torch.int32) for length in lengths],
        "n_tokens": list(lengths),
        "n_written": list(lengths),
        "oldest_version": [batch] * n,
        "reward": [1.0] * n,
        "finish_reason": ["stop"] * n,
        "truncated": [False] * n,
        "n_turns": [1] * n,
        "lost": [0] * n,
        "t_sent": [now] * n,
        "t_generated": [now] * n,
        "t_rewarded": [now] * n,
    }


def one_round(client: QueueClient, ranks: list[Connection], lengths: list[int], batch: int, at_once: bool) -> float:
    """Seconds from the start of the last put until both ranks hold their rows. at_once: it is the only one."""
    count = len(lengths)
    early = 0 if at_once else count - GROUP
    ranks[0].send((batch, count, early))
    for start in range(0, early, GROUP):
        position = start // GROUP
        client.put(TRAIN, columns_of(range(position, position + 1), lengths[start : start + GROUP], start, batch))
    assert ranks[0].recv() == "early"
    last = columns_of(range(early // GROUP, count // GROUP), lengths[early:], early, batch)
    began = time.perf_counter()
    client.put(TRAIN, last)
    held = max(rank.recv() for rank in ranks)
    assert ranks[0].recv() == "cleared"
    return held - began


# Pickle over one socket ----------------------------------------------------------------------------------------------


def receive(port: int, pipe: Connection) -> None:
    socket = zmq.Context().socket(zmq.PULL)
    socket.connect(f"tcp://{HOST}:{port}")
    while count := pipe.recv():
        messages = [pickle.loads(socket.recv()) for _ in range(count)]
        pipe.send(time.perf_counter())
        del messages


@contextmanager
def receiver() -> Iterator[tuple[zmq.Socket, Connection]]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    socket = zmq.Context().socket(zmq.PUSH)
    socket.set_hwm(0)
    process = spawn.Process(target=receive, args=(socket.bind_to_random_port(f"tcp://{HOST}"), theirs))
    process.start()
    try:
        yield socket, ours
        ours.send(0)
        process.join(SECONDS)
    finally:
        process.kill()


def pickled(socket: zmq.Socket, pipe: Connection, lengths: list[int], one_tensor: bool) -> float:
    """Seconds to bring what ranks read of a batch to another process."""
    columns = columns_of(range(len(lengths) // GROUP), lengths, 0, 0)
    rows = [{name: columns[name][i] for name in RANK_COLUMNS} for i in range(len(lengths))]
    pipe.send(1 if one_tensor else len(rows))
    began = time.perf_counter()
    if one_tensor:
        rows = [{name: torch.cat(columns[name]).numpy() for name in RANK_COLUMNS}]
    for row in rows:
        socket.send(pickle.dumps(row, protocol=pickle.HIGHEST_PROTOCOL), copy=False)
    return pipe.recv() - began


# The bench -----------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--whole", type=int, default=3, help="rounds of a whole batch at once")
    parser.add_argument("--only", choices=[f"{rows}x{tokens}" for rows, tokens in SIZES], help="rows x tokens")
    options = parser.parse_args()
    contract, batches = contract_of(), itertools.count()
    result: dict[str, dict[str, float]] = {}
    with (
        local_queue(contract) as server,
        trainer(server.endpoints, contract) as ranks,
        receiver() as (socket, pipe),
        QueueClient(server.endpoints, contract, "rollout.0") as client,
    ):
        for rows, tokens in SIZES:
            name = f"{rows}x{tokens}"
            if options.only not in (None, name):
                continue
            lengths = lengths_of(rows, tokens)

            def rounds(count: int, at_once: bool, lengths: list[int] = lengths) -> list[float]:
                return [one_round(client, ranks, lengths, next(batches), at_once) for _ in range(count)]

            path = rounds(options.rounds + 1, at_once=False)[1:]  # the first finds cold caches
            whole = statistics.median(rounds(options.whole, at_once=True))
            by_row, by_tensor = (
                statistics.median(pickled(socket, pipe, lengths, one) for _ in range(options.whole))
                for one in (False, True)
            )
            result[name] = {
                "p50_ms": round(1e3 * statistics.median(path), 2),
                "max_ms": round(1e3 * max(path), 2),
                "whole_ms": round(1e3 * whole, 1),
                "whole_over_pickled_rows": round(whole / by_row, 2),
                "whole_over_pickled_tensors": round(whole / by_tensor, 2),
            }
            print(f"{name}: {result[name]}", flush=True)
    met = all(numbers["p50_ms"] <= BAR_MS for numbers in result.values())
    print(json.dumps({**result, "bar_ms": BAR_MS, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
