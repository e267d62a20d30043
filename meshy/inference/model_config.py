"""What a model's config.json says that matters for placing it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshy.models import read_config

_OF_TENSORS = (
    "model_type", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "num_experts", "tie_word_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """The language model in a folder in Hugging Face format. context_length: 0 where the file does not say."""

    folder: Path
    architectures: tuple[str, ...]
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    context_length: int
    own_code: bool

    def cache_bytes_per_token(self, element: int) -> int:
        """Bytes of keys and values that one token takes, at `element` bytes a number."""
        return max(1, 2 * self.layers * self.kv_heads * self.head_dim * element)


def read_model_config(folder: Path) -> ModelConfig:
    """Raises ModelError where config.json cannot be read."""
    whole = read_config(folder)
    text = whole.get("text_config", whole)  # of models that also see or hear
    heads = int(text.get("num_attention_heads") or 1)
    return ModelConfig(
        folder=folder,
        architectures=tuple(whole.get("architectures") or ()),
        dtype=str(_first(text, whole, "dtype", "torch_dtype") or "float32"),
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or int(text.get("hidden_size") or 0) // heads),
        layers=int(text.get("num_hidden_layers") or 1),
        context_length=int(text.get("max_position_embeddings") or 0),
        own_code="auto_map" in whole,
    )


def tensor_sizes(folder: Path) -> dict[str, Any]:
    """What its config.json says of which tensors it has and their shapes. Raises ModelError."""
    whole = read_config(folder)
    text = whole.get("text_config", whole)
    return {name: text[name] for name in _OF_TENSORS if name in text}


def _first(text: dict[str, Any], whole: dict[str, Any], *names: str) -> Any:
    return next((source[name] for source in (text, whole) for name in names if source.get(name)), None)


def sharding_faults(model: ModelConfig, tp: int) -> list[str]:
    """What keeps the model's attention heads from being split over `tp` GPUs, by SGLang's rules."""
    if model.heads % tp:
        fits = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
        return [f"tp: the model's {model.heads} attention heads do not divide by tp={tp}; choose one of {fits}"]
    if model.kv_heads % tp and tp % model.kv_heads:
        return [
            f"tp: the model's {model.kv_heads} key-value heads and tp={tp} must divide one another; "
            "choose another tp, or more replicas"
        ]
    return []
