"""Time and memory of a publish: a random model of 500 MB to two embedded replicas, warm, as ratios within one run.

    python scripts/bench/publish.py [--megabytes 500] [--repeat 7] [--bucket-mb 64]

  shm          shared memory / one copy of the same bytes, warm                          at most 5
  collective   broadcast to the replicas / a bare gloo broadcast of the same bytes       at most 1.5
  memory       what the publishing process grows by / the bucket                         at most 1.05

The publishing process holds the weights whole, as one trainer rank would; the last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MESHY_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
BARS = {"shm/over_copy": 5.0, "collective/over_broadcast": 1.5, "shm/memory": 1.05, "collective/memory": 1.05}


def make_model(folder: Path, megabytes: int) -> None:
    """Qwen3's shape in float32, no tensor larger than half a bucket."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, inter = 1024, 3072
    layer = hidden * (2 * 16 * 64 + 2 * 8 * 64) + 3 * hidden * inter
    layers = max(1, round((megabytes * 1e6 / 4 - 4096 * hidden) / layer))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096, hidden_size=hidden, intermediate_size=inter, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


@contextmanager
def servers(folder: Path, count: int) -> Iterator[list[str]]:
    command = [sys.executable, "-m", "meshy.inference.embedded", "--model-path", str(folder), "--port", "0"]
    command += ["--threads", "1", "--max-running-requests", "2", "--context-length", "64"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) for _ in range(count)]
    try:
        urls = []
        for server in started:
            assert server.stdout is not None
            urls.append(next(line.split()[-1] for line in server.stdout if line.startswith("ready on")))
        yield urls
    finally:
        for server in started:
            server.terminate()
        for server in started:
            server.wait(20)


def resident() -> int:
    """Bytes that this process holds in memory; a segment that it shares counts once."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The most memory that this process held while the block ran, sampled."""

    def __enter__(self) -> Peak:
        self.bytes = resident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._over.wait(0.005):
            self.bytes = max(self.bytes, resident())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


class Receivers:
    """Two processes that receive a bare gloo broadcast of `size` bytes, again and again."""

    def __init__(self, size: int) -> None:
        import torch
        import torch.distributed as dist

        from meshy.queue.local import free_ports

        (port,) = free_ports(1)
        command = [sys.executable, __file__, "--receiver", str(port), str(size)]
        self._processes = [subprocess.Popen([*command, str(rank)], env=ENVIRONMENT) for rank in (1, 2)]
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=3)
        self._go = torch.ones(1)
        self._data = torch.ones(size, dtype=torch.uint8)

    def broadcast(self) -> float:
        """Seconds until all bytes have gone out."""
        import torch.distributed as dist

        dist.broadcast(self._go, 0)
        dist.barrier()
        return timed(lambda: dist.broadcast(self._data, 0))

    def end(self) -> None:
        import torch.distributed as dist

        dist.broadcast(self._go.zero_(), 0)
        for process in self._processes:
            process.wait(60)
        dist.destroy_process_group()


def receive(port: int, size: int, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    go, data = torch.ones(1), torch.zeros(size, dtype=torch.uint8)
    while True:
        dist.broadcast(go, 0)
        if not go.item():
            break
        dist.barrier()
        dist.broadcast(data, 0)
    dist.destroy_process_group()


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(folder: Path, repeat: int, bucket: int) -> dict[str, float]:
    """Memory at first, then the times of everything in turn, so that the machine's moods meet all alike."""
    import torch
    from safetensors.torch import load_file

    from meshy.training.weights.collective import Collective
    from meshy.training.weights.publisher import Carrier, Publisher
    from meshy.training.weights.shm import Shm

    torch.set_num_threads(1)
    weights = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    size = sum(tensor.nbytes for tensor in weights.values())
    versions = itertools.count(1)
    result = {"megabytes": size / 1e6}
    with servers(folder, 2) as urls:
        publisher = Publisher(urls, deadline=120)
        publisher.start(60)
        ranks = dict.fromkeys(urls, 1)
        carriers: dict[str, Carrier] = {
            "shm": Shm(ranks, bucket),
            "collective": Collective("127.0.0.1", 0, ranks, bucket, torch.device("cpu")),
        }

        def publish(mode: str) -> None:
            publisher.carrier = carriers[mode]
            published = publisher.stream(next(versions), urls, weights.items(), torch.float32)
            if len(published.served) != len(urls):
                raise RuntimeError(f"not published: {published.behind}")

        for mode in carriers:
            before = resident()
            with Peak() as peak:
                publish(mode)
                publish(mode)
            result[f"{mode}/memory"] = (peak.bytes - before) / bucket
        flat, target = torch.zeros(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
        receivers = Receivers(size)
        contestants: dict[str, Callable[[], float]] = {
            "copy": lambda: timed(lambda: target.copy_(flat)),
            "shm": lambda: timed(lambda: publish("shm")),
            "broadcast": receivers.broadcast,
            "collective": lambda: timed(lambda: publish("collective")),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(repeat + 1):
            for name, contestant in contestants.items():
                seconds[name].append(contestant())
        receivers.end()
        publisher.close()
    result |= {f"{name}/ms": 1e3 * statistics.median(taken[1:]) for name, taken in seconds.items()}
    result["shm/over_copy"] = result["shm/ms"] / result["copy/ms"]
    result["collective/over_broadcast"] = result["collective/ms"] / result["broadcast/ms"]
    return {name: round(value, 3) for name, value in result.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--receiver", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receiver:
        receive(*options.receiver)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        make_model(Path(scratch), options.megabytes)
        result = measure(Path(scratch), options.repeat, options.bucket_mb << 20)
    missed = [f"{name} is {result[name]}, at most {bar}" for name, bar in BARS.items() if result[name] > bar]
    for line in missed:
        print(line, file=sys.stderr)
    print(json.dumps(result))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
