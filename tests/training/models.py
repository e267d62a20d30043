"""Small models in Hugging Face format, made from a seed."""

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 128,
    "rope_theta": 1e4,
    "initializer_range": 0.15,
}


def make_model(name: str, folder: Path) -> Path:
    """`qwen3_tied`, `qwen3` (untied, a head of keys for every head of queries), `qwen2_tied` or `qwen2`."""
    torch.manual_seed(len(name))
    kv_heads = 4 if name == "qwen3" else 2
    shape = {**SHAPE, "num_key_value_heads": kv_heads, "tie_word_embeddings": name.endswith("_tied")}
    if name.startswith("qwen3"):
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=16, **shape))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**shape))
    for key, parameter in model.named_parameters():
        if key.endswith("bias") or "norm" in key:
            torch.nn.init.normal_(parameter, mean=float("norm" in key), std=0.3)
    model.save_pretrained(folder / name)
    return folder / name


def make_large_model(folder: Path) -> Path:
    """More than 200 MiB of weights in float32; quick to compute with nevertheless, for most of it is vocabulary."""
    torch.manual_seed(0)
    shape = {**SHAPE, "vocab_size": 56_000, "hidden_size": 1024, "num_hidden_layers": 1, "intermediate_size": 1024}
    config = Qwen3Config(head_dim=64, num_key_value_heads=2, tie_word_embeddings=True, **shape)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
