"""Tiny random models in the four shapes that the engine is tested with, and a server process that serves one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB = 272  # 256 bytes, three special tokens, and some rows beyond the tokenizer
CONTEXT = 256
JSON = {"content-type": "application/json"}
SHAPES = {
    "qwen3_grouped_untied": ("qwen3", 2, False),
    "qwen3_full_tied": ("qwen3", 4, True),
    "llama_grouped_tied": ("llama", 1, True),
    "llama_full_untied": ("llama", 4, False),
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: id for id, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = TEMPLATE
    return fast


def build(folder: Path, shape: str, seed: int = 0, positions: int = 512) -> Path:
    """A random float32 model of about 100k parameters with its tokenizer; peaked enough to be no uniform noise."""
    kind, kv_heads, tied = SHAPES[shape]
    tokenizer = byte_tokenizer()
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**common)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**common))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def serve(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server process with that model: its URL and itself."""
    command = [
        sys.executable,
        "-m",
        "meshy.inference.embedded",
        "--model-path",
        str(folder),
        "--threads",
        "1",
        *options,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready on"), f"the server said {line!r}"
        yield line.split()[-1], process
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def call(url: str, path: str, body: Any = None, method: str | None = None) -> tuple[int, str | None, Any]:
    """Status, content type and decoded body of one request."""
    data = None if body is None else json.dumps(body).encode()
    kind = {} if data is None else JSON
    request = urllib.request.Request(
        url + path, data=data, headers=kind, method=method or ("GET" if data is None else "POST")
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, headers, raw = answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        status, headers, raw = error.code, error.headers, error.read()
    told = headers.get("content-type")
    return status, told, json.loads(raw) if told == "application/json" else raw.decode()
