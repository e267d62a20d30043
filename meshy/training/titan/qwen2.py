"""Qwen2 and Qwen2.5 (arXiv 2407.10671): as Qwen3, with biases on queries, keys and values and without their norms."""

from typing import Any

from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.module import Module

from meshy.training.titan.policy_model import PolicyModel
from meshy.training.titan.qwen3 import decoder_config


def qwen2_config(hf: dict[str, Any], *, max_seq_len: int, inner_attention: Module.Config) -> PolicyModel.Config:
    """`hf` is the parsed config.json."""
    return decoder_config(hf, max_seq_len=max_seq_len, inner_attention=inner_attention, qkv_bias=True, qk_norm=False)


class Qwen2Adapter(Qwen3StateDictAdapter):
    """Qwen3's names, plus the three biases, less the two norms."""

    def __init__(self, model_config: PolicyModel.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        for name in ("q", "k", "v"):
            ours = f"layers.{{}}.attention.qkv_linear.w{name}.bias"
            self.from_hf_map[f"model.layers.{{}}.self_attn.{name}_proj.bias"] = ours
        for name in ("q_norm", "k_norm"):
            del self.from_hf_map[f"model.layers.{{}}.self_attn.{name}.weight"]
