"""Where the engines differ, and why that is left so. The table of docs/engines.md is made of these lines:

python -m tests.inference.contract.differences        writes it anew
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[3] / "docs" / "engines.md"
BEGIN, END = "<!-- differences -->\n", "<!-- end -->\n"


class Difference(NamedTuple):
    what: str
    sglang: str
    embedded: str
    reason: str


DIFFERENCES = (
    Difference(
        "context length",
        "names 6 tokens more than the recipe asks for, and accepts requests up to that",
        "exact",
        "SGLang takes prompts and writes responses some tokens short of its context length; with the margin, episodes "
        "of the recipe's length come out whole, and rollout asks for no longer ones",
    ),
    Difference(
        "`sampling_seed`",
        "no effect on CPU",
        "equal seeds give equal tokens, bit for bit",
        "deterministic recipes are for the embedded engine; with SGLang on CPU the service warns",
    ),
    Difference(
        "token ids outside the vocabulary",
        "may end the server",
        "400, naming the id",
        "Meshy's client checks every prompt before it is sent",
    ),
    Difference(
        "text of ids beyond the tokenizer",
        "the text of token 0",
        "nothing",
        "only untrained rows of a padded vocabulary; the token ids are what is trained on",
    ),
    Difference(
        "malformed requests",
        "400 with `{object, message}`; `n: 0` and empty prompts in a batch are served, lists that do not fit give 500",
        "400 with `{error: {message}}`, naming the field",
        "a clear refusal costs nothing; the client reads both shapes",
    ),
    Difference(
        "`/health` while paused",
        "generates a token: waits up to 20 s, then 503",
        "503 at once",
        "nothing of Meshy's asks `/health` while paused; liveness is asked of `/model_info`",
    ),
    Difference(
        "requests that come while paused",
        "wait uncounted",
        "counted in `/v1/loads` as `queues.paused`",
        "numbers to look at only",
    ),
    Difference(
        "update of weights under `in_place` with `flush_cache`",
        "400, but the weights are loaded",
        "400, and nothing is changed",
        "Meshy publishes under `retract`, where both carry it out",
    ),
    Difference(
        "tensors that the model does not have, or has in another shape",
        "unknown names are passed over and the version is set; a wrong shape from shared memory ends the server",
        "400, naming the tensor, and the bucket changes nothing",
        "the trainer sends what its own model of the same config holds",
    ),
    Difference(
        "a version after a bucket that failed",
        "set",
        "400 until the tensors that failed have come",
        "a publish that fails on a replica drops it, and the next one sends everything",
    ),
    Difference(
        "`load_format` of `/update_weights_from_tensor`",
        "also `flattened_bucket`, `direct` and custom loaders",
        "none",
        "Meshy sends views of its shared segment",
    ),
    Difference(
        "`/weights_checker` checksums",
        "of fused and padded tensors (`qkv_proj`, `gate_up_proj`), one list for each rank",
        "of the tensors as `transformers` names them",
        "each engine's own layout; the trainer maps its tensors to either",
    ),
    Difference(
        "a response without tokens",
        "one span from 0 to 0; `output_top_logprobs` has a row",
        "no span, no row",
        "nothing reads them",
    ),
    Difference(
        "times in `meta_info`",
        "only with `enable_metrics`",
        "always",
        "numbers to look at only",
    ),
    Difference(
        "memory that is released",
        "freed only with `memory_saver` on GPUs",
        "always freed",
        "what SGLang can do",
    ),
    Difference(
        "SIGTERM",
        "serves what runs, looks every 5 s; the service kills it after 1 s",
        "answers what runs as aborted, ends at once",
        "a run that ends has no use for what is in flight",
    ),
)


def table() -> str:
    rows = [("What", "SGLang 0.5.23", "Embedded", "Why it stays"), ("---",) * 4, *DIFFERENCES]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def on_page() -> str:
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().replace(BEGIN + on_page(), BEGIN + table()))
