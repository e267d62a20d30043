"""How fast the doorbell wakes a waiter, and what idle waiters cost.

    python scripts/bench/doorbell.py [--puts 20] [--idle 2.0] [--waiters 10] [--seconds 20]

Bars: from a put to the waiter's wake-up p50 <= 5 ms after 2 s of idleness; ten idle waiters, each in a process-like
client of its own, cost the controller less than 1 % of a core. Exits with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import torch

from meshy.columns import GATE_COLUMNS, TRAIN_COLUMNS, Column, Consumes, Produces
from meshy.contract import Declaration, derive_contract
from meshy.queue.local import LocalQueue, local_queue
from meshy.queue.sync import QueueClient

TOKENS = 512


def contract(waiters: int):
    names = tuple(column.name for column in TRAIN_COLUMNS)
    gates = tuple(column.name for column in GATE_COLUMNS)
    reads = (Consumes("train", names, end=True), Consumes("gen_gate", gates, end=True))
    reader = Declaration("reader", 1, reads, ())
    idle = [Declaration(f"idle{i}", 1, (Consumes("quiet", names, end=i == 0),), ()) for i in range(waiters)]
    produces = tuple(Produces(name, TRAIN_COLUMNS, creates=True) for name in ("train", "quiet"))
    produces += (Produces("gen_gate", GATE_COLUMNS, creates=True),)
    contract, faults = derive_contract([Declaration("writer", 1, (), produces), reader, *idle])
    assert not faults, faults
    return contract


def rows_of(columns: Sequence[Column], uids: list[str]) -> dict[str, list]:
    """Rows of these columns, of a usual size."""

    def value(column: Column) -> object:
        if column.kind == "jagged":
            return torch.zeros(TOKENS, dtype=getattr(torch, column.dtype))
        return {"str": "a", "bool": False, "float32": 0.0, "float64": 0.0}.get(column.dtype, 0)

    return {column.name: [value(column)] * len(uids) for column in columns} | {"uid": uids}


def wake_ups(queue: LocalQueue, contract, partition: str, puts: int, idle: float) -> tuple[list[float], ...]:
    """Seconds from the start of a put, and from its return, to the take's return in another process; and from the start
    to the rows read there."""
    columns, rows_a_put = (GATE_COLUMNS, 1) if partition == "gen_gate" else (TRAIN_COLUMNS, 8)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    reader = spawn.Process(target=_read, args=(theirs, queue.endpoints, contract, partition, rows_a_put))
    reader.start()
    from_start, from_return, to_data = [], [], []
    with QueueClient(queue.endpoints, contract, "writer.0") as writer:
        assert ours.recv() == "ready"
        for i in range(puts):
            time.sleep(idle)
            rows = rows_of(columns, [f"{i}.{j}" for j in range(rows_a_put)])
            start = time.perf_counter()
            writer.put(partition, rows)
            returned = time.perf_counter()
            woken, read = ours.recv()
            from_start.append(woken - start)
            from_return.append(woken - returned)
            to_data.append(read - start)
    reader.terminate()
    reader.join()
    return from_start, from_return, to_data


def _read(pipe, endpoints, contract, partition: str, rows_a_put: int) -> None:
    """The reader's process. perf_counter is one clock for all processes of a Linux machine."""
    with QueueClient(endpoints, contract, "reader.0") as reader:
        pipe.send("ready")
        while True:
            rows = reader.take(partition, at_least=rows_a_put)
            woken = time.perf_counter()
            reader.read(rows)
            pipe.send((woken, time.perf_counter()))
            reader.clear(rows)


def idle_cost(queue: LocalQueue, contract, waiters: int, seconds: float) -> float:
    """The controller's share of a core while `waiters` clients wait for rows that do not come."""
    clients = [QueueClient(queue.endpoints, contract, f"idle{i}.0") for i in range(waiters)]
    threads = [threading.Thread(target=_wait_until_closed, args=(client,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    time.sleep(2.0)
    controller = max(psutil.Process(queue.processes["controller"].pid).children(), key=_listens_on(queue))
    before = controller.cpu_times()
    started = time.perf_counter()
    time.sleep(seconds)
    after = controller.cpu_times()
    wall = time.perf_counter() - started
    for client in clients:
        client.close()
    return (after.user + after.system - before.user - before.system) / wall


def _wait_until_closed(client: QueueClient) -> None:
    from meshy.queue.errors import QueueClosed

    try:
        client.take("quiet")
    except QueueClosed:
        return


def _listens_on(queue: LocalQueue):
    port = queue.endpoints.controller.request
    return lambda process: any(c.laddr and c.laddr.port == port for c in process.net_connections())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--puts", type=int, default=20)
    parser.add_argument("--idle", type=float, default=2.0)
    parser.add_argument("--waiters", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    agreed = contract(options.waiters)
    with local_queue(agreed) as queue:
        cost = idle_cost(queue, agreed, options.waiters, options.seconds)
        gates = wake_ups(queue, agreed, "gen_gate", options.puts, options.idle)
        groups = wake_ups(queue, agreed, "train", options.puts, options.idle)

    def p50(seconds: list[float]) -> str:
        return f"{statistics.median(seconds) * 1e3:.2f} ms"

    rows = [(f"after {options.idle:g} s idle, p50 of {options.puts}:", "", "", True)]
    rows += [
        ("  from a gate's put to the wake-up", p50(gates[0]), "<= 5 ms", statistics.median(gates[0]) <= 5e-3),
        ("    of which after the put's return", p50(gates[1]), "", True),
        (f"  from a put of 8 rows x {TOKENS} to the wake-up", p50(groups[0]), "", True),
        ("    of which after the put's return", p50(groups[1]), "", True),
        ("    to the rows read", p50(groups[2]), "", True),
        (f"{options.waiters} idle waiters: controller", f"{cost * 100:.2f} % of a core", "< 1 %", cost < 0.01),
    ]
    for what, measured, bar, met in rows:
        print(f"{what:<48} {measured:>16}  {bar:<8} {'' if not bar else 'met' if met else 'MISSED'}")
    return 0 if all(met for *_, met in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
