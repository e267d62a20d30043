"""Speed of the embedded engine, as ratios within one run.

    OMP_NUM_THREADS=1 python scripts/bench/engine.py [--model FOLDER] [--requests 512] [--in-flight 128] [--json FILE]

Without `--model`, a random Qwen3-shaped model of about a million parameters. Every generation runs to its prescribed
length, so that all contestants write exactly the same number of tokens:

  equal      all responses of 64 tokens                     in process / transformers `generate` in batches of 128
  long tail  log-normal lengths, median 24, up to 512       the same; `generate` must pad each batch to its longest
  HTTP       long tail, engine in a process of its own      through the client / in process
  client     one request of one token at a time             the client's own processor time per request
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshy.generation import GenerationClient
from meshy.inference.embedded.engine import Engine
from meshy.inference.embedded.request import LogprobOptions, Request, SamplingParams
from meshy.inference.embedded.runner import ModelRunner
from meshy.recipe import Sampling

VOCAB = 96  # ids in prompts are below it
PROMPT = (12, 28)  # tokens, from and to
CONTEXT = 640


Prompts = list[list[int]]


def make_model(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def without_end(source: Path, folder: Path) -> None:
    """A copy of a model that no token ends, without tokenizer: every response has its prescribed length."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)


def workload(count: int, long_tail: bool) -> tuple[Prompts, list[int]]:
    """Prompts and response lengths; groups of 4 share a prompt, as in training."""
    rng = np.random.default_rng(1)
    prompts: Prompts = []
    while len(prompts) < count:
        prompts += [rng.integers(2, VOCAB, rng.integers(*PROMPT)).tolist()] * 4
    if not long_tail:
        return prompts[:count], [64] * count
    lengths = np.clip(np.exp(rng.normal(np.log(24), 1.0, count)), 4, 512).astype(int).tolist()
    return prompts[:count], lengths


def run_generate(model: Any, prompts: Prompts, lengths: list[int], batch: int) -> float:
    """Seconds that `transformers` takes, in batches in order of arrival, each until its longest response has ended."""
    start = time.perf_counter()
    for first in range(0, len(prompts), batch):
        rows = prompts[first : first + batch]
        width = max(map(len, rows))
        ids = torch.tensor([[1] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        count = max(lengths[first : first + batch])
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=count,
                min_new_tokens=count, pad_token_id=1, eos_token_id=None,
            )  # fmt: skip
    return time.perf_counter() - start


def run_engine(engine: Engine, prompts: Prompts, lengths: list[int]) -> float:
    """Seconds that the engine takes in process; the requests beyond its slots wait in its own queue."""
    done, left = threading.Event(), [len(prompts)]

    def deliver(news: list[Request]) -> None:
        left[0] -= len(news)
        if not left[0]:
            done.set()

    engine.deliver = deliver
    requests = [
        Request(
            rid=str(i), prompt=prompt, params=SamplingParams(ignore_eos=True), max_new_tokens=length, seed=i,
            stop_ids=frozenset(), logprob_options=LogprobOptions(wanted=True),
        )
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]  # fmt: skip
    start = time.perf_counter()
    engine.submit(requests)
    if not done.wait(600):
        raise TimeoutError("the engine did not finish within 600 s")
    return time.perf_counter() - start


async def run_http(url: str, prompts: Prompts, lengths: list[int], in_flight: int) -> float:
    """Seconds through the client, `in_flight` requests at a time."""
    async with GenerationClient([url], vocab_size=VOCAB, max_in_flight_per_replica=in_flight) as client:
        await client.wait_ready(60)
        start = time.perf_counter()
        jobs = [
            client.generate(prompt, Sampling(max_new_tokens=length), seed=i)
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        done = await asyncio.gather(*jobs)
        seconds = time.perf_counter() - start
    if [len(c.tokens) for c in done] != lengths:
        raise RuntimeError("a response ended early; its length is not comparable")
    return seconds


async def client_cost(url: str, count: int = 300) -> float:
    """Milliseconds of the client's own processor time per request of one token (median over batches of 10)."""
    samples = []
    async with GenerationClient([url], vocab_size=VOCAB) as client:
        prompt, sampling = list(range(2, 22)), Sampling(max_new_tokens=1)
        await client.generate(prompt, sampling)
        for _ in range(count // 10):
            start = time.process_time()
            for _ in range(10):
                await client.generate(prompt, sampling)
            samples.append((time.process_time() - start) * 100)
    return statistics.median(samples)


def interleaved(repeats: int, **contestants: Callable[[], float]) -> dict[str, float]:
    """The least seconds of each contestant, all measured in turn, so that the machine's moods meet them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, measure in contestants.items():
            seconds[name].append(measure())
    return {name: min(taken) for name, taken in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--in-flight", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", choices=("engine", "http"), default=None, help="leave the other parts out")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if arguments.model is None:
            make_model(folder)
        else:
            without_end(arguments.model, folder)
        result = measure(folder, arguments)
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result))


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    count, in_flight, repeats = arguments.requests, arguments.in_flight, arguments.repeats
    runner = ModelRunner(folder, device=torch.device("cpu"), dtype=None, slots=in_flight, context_length=CONTEXT)
    engine = Engine(runner, max_running=in_flight)
    engine.start()
    run_engine(engine, *workload(64, False))
    result: dict[str, float] = {}
    if arguments.only != "http":
        for name, long_tail in (("equal", False), ("long_tail", True)):
            result |= against_generate(engine, folder, name, *workload(count, long_tail), in_flight, repeats)
    if arguments.only != "engine":
        result |= through_http(engine, folder, *workload(count, True), in_flight, repeats)
    engine.close()
    return {key: round(value, 3) for key, value in result.items()}


def against_generate(
    engine: Engine, folder: Path, name: str, prompts: Prompts, lengths: list[int], in_flight: int, repeats: int
) -> dict[str, float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    run_generate(model, prompts[:16], [4] * 16, 16)
    seconds = interleaved(
        repeats,
        engine=lambda: run_engine(engine, prompts, lengths),
        generate=lambda: run_generate(model, prompts, lengths, in_flight),
    )
    return {
        f"{name}/engine_tokens_per_s": sum(lengths) / seconds["engine"],
        f"{name}/generate_tokens_per_s": sum(lengths) / seconds["generate"],
        f"{name}/engine_over_generate": seconds["generate"] / seconds["engine"],
    }


def through_http(
    engine: Engine, folder: Path, prompts: Prompts, lengths: list[int], in_flight: int, repeats: int
) -> dict[str, float]:
    command = [
        sys.executable, "-m", "meshy.inference.embedded", "--model-path", str(folder), "--port", "0", "--threads", "1",
        "--max-running-requests", str(in_flight), "--context-length", str(CONTEXT),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        url = next(line.split()[-1] for line in server.stdout if line.startswith("ready on"))
        asyncio.run(run_http(url, prompts[:64], [8] * 64, in_flight))
        seconds = interleaved(
            repeats,
            engine=lambda: run_engine(engine, prompts, lengths),
            http=lambda: asyncio.run(run_http(url, prompts, lengths, in_flight)),
        )
        cost = asyncio.run(client_cost(url))
    finally:
        server.terminate()
        server.wait(20)
    return {
        "http/tokens_per_s": sum(lengths) / seconds["http"],
        "http/over_in_process": seconds["engine"] / seconds["http"],
        "client/ms_per_request": cost,
    }


if __name__ == "__main__":
    main()
