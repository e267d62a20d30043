"""Qwen2 and Qwen2.5 (arXiv 2407.10671): as Qwen3, with biases on queries, keys and values and without their norms."""

from typing import Any

from torchtitan.protocols.module import Module

from meshy.titan.policy_model import PolicyModel
from meshy.titan.qwen3 import Qwen3Adapter, decoder_config


def qwen2_config(
    hf: dict[str, Any], *, max_seq_len: int, inner_attention: Module.Config, value_head: bool
) -> PolicyModel.Config:
    """`hf` is the parsed config.json."""
    return decoder_config(
        hf,
        max_seq_len=max_seq_len,
        inner_attention=inner_attention,
        value_head=value_head,
        qkv_bias=True,
        qk_norm=False,
    )


class Qwen2Adapter(Qwen3Adapter):
    """Qwen3's names, plus the three biases, less the two norms."""

    def __init__(self, model_config: PolicyModel.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        for name in ("q", "k", "v"):
            ours = f"layers.{{}}.attention.qkv_linear.w{name}.bias"
            self.from_hf_map[f"model.layers.{{}}.self_attn.{name}_proj.bias"] = ours
        for name in ("q_norm", "k_norm"):
            del self.from_hf_map[f"model.layers.{{}}.self_attn.{name}.weight"]
