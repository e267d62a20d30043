"""What the client costs in front of an engine, at many requests in flight.

    OMP_NUM_THREADS=1 python scripts/bench/client.py [--requests 1024] [--in-flight 128] [--only embedded|sglang]

Against the embedded engine, and against real SGLang where `make sglang` has made its environment; both serve the demo
model in a process of their own. For each, in milliseconds (medians):

  own        of one request: from the call to the bytes in the socket, and from the answer's bytes to the Completion;
             what the request waits for is not counted
  bare       the same of a bare POST with the same pool of connections and the same JSON, nothing else
  request    from the call to the Completion, waiting included
  own_share  of the time between two answers (that is, of one core): own x requests / seconds
  over_in_process  SGLang's tokens/s through the client, over those of its engine without a server (`engine.py` tells
                   it of the embedded engine)

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from meshy.generation import GenerationClient
from meshy.generation.completion import sampling_fields
from meshy.generation.own_time import OwnTime
from meshy.generation.transport import Transport
from meshy.inference.model_config import read_model_config
from meshy.inference.sglang.arguments import ServerPlan, server_arguments, server_environment
from meshy.inference.sglang.server import SglangServer
from meshy.recipe import Sampling

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "recipes" / "demo_model"
SGLANG_PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
HOST = "127.0.0.1"
CONTEXT = 256
PROMPT = (12, 28)  # tokens, from and to
GROUP = 8  # requests that share a prompt
SAMPLING = Sampling(max_new_tokens=24)


@contextmanager
def embedded(in_flight: int) -> Iterator[str]:
    command = [sys.executable, "-m", "meshy.inference.embedded", "--model-path", str(MODEL), "--port", "0"]
    command += ["--threads", "1", "--max-running-requests", str(in_flight), "--context-length", str(CONTEXT)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert server.stdout is not None
        yield next(line.split()[-1] for line in server.stdout if line.startswith("ready on"))
    finally:
        server.terminate()
        server.wait(20)


def sglang_plan(in_flight: int) -> ServerPlan:
    with socket.socket() as one, socket.socket() as two:
        one.bind((HOST, 0))
        two.bind((HOST, 0))
        port, meeting = one.getsockname()[1], two.getsockname()[1]
    return ServerPlan(
        python=SGLANG_PYTHON, model=read_model_config(MODEL), host=HOST, port=port, rendezvous=f"{HOST}:{meeting}",
        on_gpu=False, dtype="auto", context_length=CONTEXT, max_running_requests=in_flight, weight_version=0,
        random_seed=0,
    )  # fmt: skip


@contextmanager
def sglang(in_flight: int) -> Iterator[str]:
    server = SglangServer(sglang_plan(in_flight))
    try:
        server.start()
        server.wait_ready(180)
        yield f"http://{HOST}:{server.plan.port}"
    finally:
        server.close()


def sglang_in_process(prompts: list[list[int]], in_flight: int) -> float:
    """Tokens per second of SGLang's engine without a server, which is given all prompts at once."""
    plan = sglang_plan(in_flight)
    fields = sampling_fields(SAMPLING, SAMPLING.max_new_tokens, None)
    job = {"arguments": server_arguments(plan), "prompts": prompts, "sampling": fields}
    script = Path(__file__).with_name("in_process") / "sglang_engine.py"
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            [plan.python, script], input=json.dumps(job), stdout=subprocess.PIPE, text=True, timeout=300, check=True,
            env=server_environment(plan, os.environ, Path(scratch)),
        )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])["tokens_per_s"]


def prompts_of(count: int) -> list[list[int]]:
    vocabulary = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    rng = np.random.default_rng(1)
    prompts: list[list[int]] = []
    while len(prompts) < count:
        prompts += [rng.integers(4, vocabulary, rng.integers(*PROMPT)).tolist()] * GROUP
    return prompts[:count]


async def through_client(url: str, prompts: list[list[int]], in_flight: int) -> dict[str, float]:
    async with GenerationClient([url], max_in_flight_per_replica=in_flight) as client:
        await asyncio.gather(*(client.generate(prompt, SAMPLING) for prompt in prompts[:in_flight]))
        waits: list[float] = []
        slots = asyncio.Semaphore(in_flight)

        async def one(index: int, prompt: list[int]) -> int:
            async with slots:
                began = time.perf_counter()
                done = await client.generate(prompt, SAMPLING, key=str(index // GROUP))
                waits.append(time.perf_counter() - began)
            return len(done.tokens)

        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts))))
        seconds = time.perf_counter() - began
        own = client.own_seconds()
    return {
        "own_ms": own * 1e3,
        "request_ms": statistics.median(waits) * 1e3,
        "own_share": own * len(prompts) / seconds,
        "tokens_per_s": tokens / seconds,
    }


async def bare(url: str, prompts: list[list[int]], in_flight: int) -> float:
    """Milliseconds of a bare request's own time."""
    http, slots, own = Transport(), asyncio.Semaphore(in_flight), []

    async def one(prompt: list[int]) -> None:
        fields = sampling_fields(SAMPLING, SAMPLING.max_new_tokens, None)
        body = {"input_ids": prompt, "sampling_params": fields, "return_logprob": True}
        async with slots:
            work = OwnTime(http.request("POST", url + "/generate", body, None))
            await work
            own.append(work.seconds)

    await asyncio.gather(*(one(prompt) for prompt in prompts))
    await http.close()
    return statistics.median(own) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--in-flight", type=int, default=128)
    parser.add_argument("--only", choices=("embedded", "sglang"), default=None)
    arguments = parser.parse_args()
    engines = {"embedded": embedded}
    if SGLANG_PYTHON.is_file():
        engines["sglang"] = sglang
    prompts = prompts_of(arguments.requests)
    result: dict[str, float] = {}
    for name, serve in engines.items():
        if arguments.only not in (None, name):
            continue
        with serve(arguments.in_flight) as url:
            numbers = asyncio.run(through_client(url, prompts, arguments.in_flight))
            numbers["bare_ms"] = asyncio.run(bare(url, prompts, arguments.in_flight))
        if name == "sglang":
            numbers["over_in_process"] = numbers["tokens_per_s"] / sglang_in_process(prompts, arguments.in_flight)
        result |= {f"{name}/{key}": round(value, 3) for key, value in numbers.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
