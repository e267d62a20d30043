"""Where an engine keeps the tensors of a checkpoint: under which names, put together and cut over its ranks how. Pure.

The embedded engine keeps them as they are. SGLang puts what one matrix product can do into one tensor (q, k and v;
gate and up), cuts it over `tp` ranks, and pads the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

# Whose tensors SGLang's models name and cut as `place` says. config.json's model_type.
FUSED_MODELS = frozenset({"llama", "mistral", "qwen2", "qwen3"})
EMBEDDED = "meshy-embedded"  # the version that the embedded engine tells in `/server_info`
VOCAB_PADDING = 64  # SGLang's vocabularies are multiples of it
MLP_PADDING_ON_CPU = 32  # for each rank

_FUSED = {
    "q_proj": ("qkv_proj", 0, 3),
    "k_proj": ("qkv_proj", 1, 3),
    "v_proj": ("qkv_proj", 2, 3),
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
}
_LAYER = re.compile(r"(model\.layers\.\d+\.(?:self_attn|mlp)\.)(\w+)\.(weight|bias)")

Cut = Literal["whole", "rows", "columns", "kv_heads", "vocabulary"]


class UnknownLayout(ValueError):
    """A model or engine whose tensors are kept in a way that is not known here. Says which."""


@dataclass(frozen=True, slots=True)
class Layout:
    """fused: as in SGLang. on_gpu: the engine computes its checksums there. tp: its ranks."""

    dtype: torch.dtype
    fused: bool = False
    tp: int = 1
    on_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """A checkpoint's tensor is part number `part` of `parts` of the engine's tensor `name`, and is cut how."""

    name: str
    part: int = 0
    parts: int = 1
    cut: Cut = "whole"


def layout_of(server: Mapping[str, Any], config: Mapping[str, Any], dtype: torch.dtype) -> Layout:
    """Of an engine, from its `/server_info` and the model's config.json. dtype: where the engine's is "auto".

    Raises UnknownLayout.
    """
    fused = server.get("version") != EMBEDDED
    kind = str(server.get("dtype", "auto"))
    own = {"half": "float16", "float": "float32", "bfloat16": "bfloat16"}.get(kind, kind)
    if own != "auto":
        dtype = getattr(torch, own)
    layout = Layout(dtype, fused, int(server.get("tp_size") or 1), str(server.get("device", "cpu")).startswith("cuda"))
    if not fused:
        return layout
    if config.get("model_type") not in FUSED_MODELS:
        known = ", ".join(sorted(FUSED_MODELS))
        raise UnknownLayout(f"how SGLang keeps the tensors of a {config.get('model_type')!r} is not known (of {known})")
    if quantization := server.get("quantization"):
        raise UnknownLayout(f"its weights are quantised ({quantization})")
    for name in ("pp_size", "dp_size"):
        if int(server.get(name) or 1) > 1:
            raise UnknownLayout(f"it has {name}={server[name]}")
    if not layout.on_gpu:
        _refuse_padding(config, layout.tp)
    return layout


def _refuse_padding(config: Mapping[str, Any], tp: int) -> None:
    """On a CPU, SGLang fills up heads and the width of the MLP where they do not divide evenly."""
    heads = _kv_heads(config)
    for name, value, multiple in (
        ("num_key_value_heads", heads, tp),
        ("intermediate_size", int(config["intermediate_size"]), MLP_PADDING_ON_CPU * tp),
    ):
        if value % multiple:
            raise UnknownLayout(f"on a CPU with tp={tp}, SGLang pads {name}={value} to a multiple of {multiple}")


def _kv_heads(config: Mapping[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def second_name(name: str, config: Mapping[str, Any]) -> bool:
    """Whether an engine keeps that tensor under another name already, because it is tied."""
    return name == "lm_head.weight" and bool(config.get("tie_word_embeddings"))


def place(name: str) -> Place:
    """Where SGLang keeps a checkpoint's tensor."""
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return Place(name, cut="vocabulary")
    match = _LAYER.fullmatch(name)
    if match is None:
        return Place(name)
    stem, module, kind = match.groups()
    if module in _FUSED:
        target, part, parts = _FUSED[module]
        cut: Cut = "kv_heads" if module in ("k_proj", "v_proj") else "rows"
        return Place(f"{stem}{target}.{kind}", part, parts, cut)
    if module in ("o_proj", "down_proj") and kind == "weight":
        return Place(name, cut="columns")
    return Place(name)


def shard(tensor: Tensor, cut: Cut, rank: int, tp: int, config: Mapping[str, Any]) -> tuple[Tensor, int]:
    """A rank's share, [rows, ...], and how many rows of zeros follow it."""
    if cut == "vocabulary":
        return _vocabulary(tensor, rank, tp)
    if cut == "columns":
        width = tensor.shape[1] // tp
        return tensor[:, rank * width : (rank + 1) * width], 0
    if cut == "kv_heads":
        heads = _kv_heads(config)
        if tp > heads:  # several ranks have the same head
            rank, tp = rank // (tp // heads), heads
    if cut == "whole":
        return tensor, 0
    height = tensor.shape[0] // tp
    return tensor[rank * height : (rank + 1) * height], 0


def _vocabulary(tensor: Tensor, rank: int, tp: int) -> tuple[Tensor, int]:
    rows = tensor.shape[0]
    multiple = VOCAB_PADDING
    if -(-rows // multiple) * multiple % tp:
        multiple *= tp
    height = -(-rows // multiple) * multiple // tp
    mine = tensor[rank * height : (rank + 1) * height]
    return mine, height - mine.shape[0]
