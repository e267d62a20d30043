"""How much of a teacher's time is forward passes, and what of its logits is ever in memory.

    python scripts/bench/teacher.py [--rows 1536] [--rounds 5] [--model recipes/demo_teacher]

  tokens/s     rows that wait in a real queue: taken, read, scored and written back by the service, over a bare forward
               pass (with all logits, as a trainer or an evaluation makes it) of the same tokens, in turn   at least 0.9
  memory       scoring one long row of a large vocabulary, over the size of all its logits                  at most 0.25

One process, one thread; the best of all rounds each. The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MESHY_DEVICE", "cpu")

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.scoring.stage import CANDIDATES, Stage, recipe_of  # noqa: E402

K = 8
LENGTHS = (24, 96)
LONG_ROW, LARGE_VOCABULARY = 4096, 128_000


def rates(model: Path, rows: int, rounds: int) -> dict[str, float]:
    """Tokens a second: `bare` forward passes, and through the `service`."""
    from meshy.titan.build import micro_batch_tokens
    from meshy.titan.micro_batch import Sample, pack
    from meshy.titan.sharing import micro_batches

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(*LENGTHS, (rows,), generator=generator).tolist()
    best = {"bare": 0.0, "service": 0.0}
    with Stage(recipe_of(str(model), rows)) as stage:
        service = stage.service
        samples = [
            Sample(
                tokens=torch.randint(8, 200, (length,), generator=generator),
                loss_mask=torch.arange(length) >= length // 3,
                columns={CANDIDATES: torch.randint(0, 200, (length, K), generator=generator, dtype=torch.int32)},
            )
            for length in lengths
        ]
        everything = [dataclasses.replace(s, loss_mask=torch.arange(len(s.tokens)) >= 1) for s in samples]
        plan = micro_batches(range(rows), lengths, micro_batch_tokens(service.config, service.recipe), packed=True)
        for round in range(rounds):
            began = time.perf_counter()
            with torch.no_grad():
                for members in plan:
                    service.engine.logits(pack([everything[i] for i in members]))
            best["bare"] = max(best["bare"], sum(lengths) / (time.perf_counter() - began))
            stage.put(samples, round)
            began = time.perf_counter()
            stage.score_all(rows)
            best["service"] = max(best["service"], sum(lengths) / (time.perf_counter() - began))
            stage.clear()
    return best


def long_row(part_mb: int) -> int:
    """Bytes by which a process grows that scores a row of which all logits would take LONG_ROW x LARGE_VOCABULARY."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from meshy.scoring.likelihood import likelihoods
    from meshy.spmd.groups import Place, ProcessGroups
    from meshy.titan.engine import EngineConfig, TitanEngine
    from meshy.titan.micro_batch import Sample, pack

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        shape: dict[str, Any] = {"vocab_size": LARGE_VOCABULARY, "hidden_size": 64, "intermediate_size": 64}
        shape |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
        config = Qwen3Config(max_position_embeddings=LONG_ROW, tie_word_embeddings=True, rope_theta=1e4, **shape)
        Qwen3ForCausalLM(config).save_pretrained(folder)
        groups = ProcessGroups(Place(0, 1, "127.0.0.1", int(os.environ["BENCH_PORT"])))
        engine = TitanEngine(EngineConfig(model=Path(folder), max_seq_len=LONG_ROW, packed=True, optimizer=None))

        def score(length: int) -> None:
            sample = Sample(torch.randint(0, 1000, (length,)), torch.arange(length) >= 1, {})
            batch = pack([sample], (), 4)
            reduce = likelihoods(("sampled", "topk"), targets=batch.targets, candidates=None, k=K, temperature=1.0)
            engine.reduced(batch, reduce, part_mb * 2**20 // (4 * LARGE_VOCABULARY))

        score(16)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        score(LONG_ROW)
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        groups.close()
    return grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1536)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, default=ROOT / "recipes" / "demo_teacher")
    parser.add_argument("--part-mb", type=int, default=64)
    parser.add_argument("--long-row", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.long_row:
        print(long_row(options.part_mb))
        return
    best = rates(options.model, options.rows, options.rounds)
    from meshy.queue.local import free_ports

    (port,) = free_ports(1)
    command = [sys.executable, __file__, "--long-row", "--part-mb", str(options.part_mb)]
    told = subprocess.run(
        command, check=True, text=True, stdout=subprocess.PIPE, env={**os.environ, "BENCH_PORT": str(port)}
    )
    grown, whole = int(told.stdout.split()[-1]), LONG_ROW * LARGE_VOCABULARY * 4
    result = {
        "bare_tokens_per_second": round(best["bare"]),
        "service_tokens_per_second": round(best["service"]),
        "ratio": round(best["service"] / best["bare"], 3),
        "all_logits_mb": whole // 2**20,
        "grown_mb": grown // 2**20,
        "memory_ratio": round(grown / whole, 3),
    }
    print(f"tokens/s: {result['service_tokens_per_second']} scored, {result['bare_tokens_per_second']} bare")
    print(f"memory: {result['grown_mb']} MiB for {result['all_logits_mb']} MiB of logits")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
