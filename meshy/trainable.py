"""Which models can be trained, and score: what their config.json may say, and which weights must lie beside it.
Torch-free, so that it is known before anything is spawned."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshy.models import read_config, weight_headers

KINDS = ("qwen3", "qwen2")
DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors calls them
VALUE = "score.weight"  # as transformers calls the head of a sequence classifier
SIZES = (
    "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
)  # fmt: skip

_Shapes = dict[str, tuple[int, ...]]


def loading_faults(folder: Path, context_length: int, *, value_head: bool = False) -> list[str]:
    """What keeps a whole folder (see `meshy.models.folder_faults`) from being loaded and taking rows of so many tokens.
    value_head: with a head that gives one number, which is made where the weights hold none. Raises ModelError where
    config.json cannot be read."""
    hf = read_config(folder)
    if faults := config_faults(hf):
        return [f"{folder / 'config.json'}: {fault}" for fault in faults]
    faults = _weight_faults(folder, hf, value_head)
    if (longest := hf.get("max_position_embeddings", context_length)) < context_length:
        faults.append(f"{folder} takes rows of {longest} tokens, but context_length is {context_length}; lower that")
    return faults


def config_faults(hf: Mapping[str, Any]) -> list[str]:
    """Of a parsed config.json: an architecture, or a setting of it, that is not supported."""
    kind = hf.get("model_type")
    if kind not in KINDS:
        return [f"model_type {kind!r} is not supported here; supported: {', '.join(KINDS)}"]
    faults = [
        f"{name}: expected a whole number of at least 1, got {hf.get(name)!r}"
        for name in SIZES
        if type(hf.get(name)) is not int or hf[name] < 1
    ]
    if not isinstance(hf.get("rms_norm_eps"), (int, float)):
        faults.append(f"rms_norm_eps: expected a number, got {hf.get('rms_norm_eps')!r}")
    if faults:
        return faults
    if hf["num_attention_heads"] % hf["num_key_value_heads"]:
        faults.append("num_attention_heads is no multiple of num_key_value_heads")
    if kind == "qwen3" and hf.get("attention_bias"):
        faults.append("a Qwen3 model with attention_bias=true is not supported")
    if hf.get("use_sliding_window"):
        faults.append("sliding-window attention (use_sliding_window=true) is not supported")
    if hf.get("hidden_act", "silu") != "silu":
        faults.append(f"hidden_act {hf['hidden_act']!r} is not supported; only silu is")
    return faults + _rope_faults(hf)


def _rope_faults(hf: Mapping[str, Any]) -> list[str]:
    """Scaled variants need an attention factor that TorchTitan does not apply."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        return [f"rope type {kind!r} is not supported; only plain rotary positions (default) are"]
    if not isinstance(hf.get("rope_theta") or rope.get("rope_theta"), (int, float)):
        return ["it has no rope_theta, the base of the rotary positions"]
    return []


def rope_theta(hf: Mapping[str, Any]) -> float:
    """Base of the rotary positions of a supported model."""
    return float(hf.get("rope_theta") or hf["rope_parameters"]["rope_theta"])


def head_dim(hf: Mapping[str, Any]) -> int:
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def expected_weights(hf: Mapping[str, Any], *, value_head: bool = False) -> _Shapes:
    """Hugging Face names and shapes of what a supported model is loaded from; a value head's is loaded where it is
    there."""
    dim, hidden, vocab = hf["hidden_size"], hf["intermediate_size"], hf["vocab_size"]
    queries, keys = hf["num_attention_heads"] * head_dim(hf), hf["num_key_value_heads"] * head_dim(hf)
    layer: _Shapes = {
        "self_attn.q_proj.weight": (queries, dim),
        "self_attn.k_proj.weight": (keys, dim),
        "self_attn.v_proj.weight": (keys, dim),
        "self_attn.o_proj.weight": (dim, queries),
        "mlp.gate_proj.weight": (hidden, dim),
        "mlp.up_proj.weight": (hidden, dim),
        "mlp.down_proj.weight": (dim, hidden),
        "input_layernorm.weight": (dim,),
        "post_attention_layernorm.weight": (dim,),
    }
    if hf["model_type"] == "qwen3":
        layer |= {f"self_attn.{name}_norm.weight": (head_dim(hf),) for name in "qk"}
    else:
        layer |= {f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", queries), ("k", keys), ("v", keys))}
    weights: _Shapes = {"model.embed_tokens.weight": (vocab, dim), "model.norm.weight": (dim,)}
    for index in range(hf["num_hidden_layers"]):
        weights |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    if value_head:
        weights[VALUE] = (1, dim)
    elif not hf.get("tie_word_embeddings", False):
        weights["lm_head.weight"] = (vocab, dim)
    return weights


def _weight_faults(folder: Path, hf: Mapping[str, Any], value_head: bool) -> list[str]:
    expected, headers = expected_weights(hf, value_head=value_head), weight_headers(folder)
    found, faults = {name: header.shape for name, header in headers.items()}, []
    if value_head and (head := found.pop(VALUE, (1,)))[0] != 1:
        faults.append(f"the head of {folder} gives {head[0]} numbers; take a model that gives one (num_labels=1)")
    if missing := [name for name in expected if name not in found and name != VALUE]:
        faults.append(f"the weights in {folder} lack {_told(missing)}, which its config.json asks for")
    if misfits := [f"{n} {list(found[n])} (not {list(s)})" for n, s in expected.items() if found.get(n, s) != s]:
        faults.append(f"the weights in {folder} are of another shape than its config.json says: {_told(misfits)}")
    if others := [f"{n} ({headers[n].dtype})" for n in expected if n in headers and headers[n].dtype not in DTYPES]:
        faults.append(
            f"the weights in {folder} are of a dtype that is not supported: {_told(others)}; supported: "
            f"{', '.join(DTYPES)}; take a model that is not quantised"
        )
    layers = hf["num_hidden_layers"]
    beyond = [n for n in found if (m := re.match(r"model\.layers\.(\d+)\.", n)) and int(m[1]) >= layers]
    if beyond:
        faults.append(f"the weights in {folder} hold {_told(beyond)}, but its config.json says {layers} layers")
    return faults


def _told(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def backend_faults(spmd_backend: str) -> list[str]:
    """Of TorchTitan's backends, those that this torch does not have yet."""
    torch = version("torch")
    if spmd_backend == "partial_dtensor" or tuple(map(int, torch.split(".")[:2])) >= (2, 14):
        return []
    return [f"spmd_backend: expected 'partial_dtensor', for torch {torch} has no other, got {spmd_backend!r}"]
