"""From a Hugging Face `config.json` to TorchTitan's description of the model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.qwen3 import parallelize_qwen3
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from meshy.models import read_config
from meshy.titan.attention import CausalAttention
from meshy.titan.qwen2 import Qwen2Adapter, qwen2_config
from meshy.titan.qwen3 import Qwen3Adapter, qwen3_config
from meshy.trainable import config_faults

# model_type -> (builder of the model's config, its Hugging Face state-dict adapter).
MODELS: dict[str, tuple[Callable[..., Any], type]] = {
    "qwen3": (qwen3_config, Qwen3Adapter),
    "qwen2": (qwen2_config, Qwen2Adapter),
}


def model_spec(folder: Path, *, max_seq_len: int, flex: bool, value_head: bool) -> ModelSpec:
    """The model in `folder`.

    max_seq_len: longest row, in tokens; sizes the rotary cache. flex: packed rows on a GPU go through FlexAttention.
    value_head: one number a token instead of logits.
    Raises ValueError where the architecture, or a setting of it, is not supported.
    """
    hf = read_config(folder)
    if faults := config_faults(hf):
        raise ValueError(f"{folder}: {'; '.join(faults)}")
    kind = hf["model_type"]
    limit = hf.get("max_position_embeddings", max_seq_len)
    if max_seq_len > limit:
        raise ValueError(f"{folder}: rows of {max_seq_len} tokens, but the model's positions end at {limit}")
    build, adapter = MODELS[kind]
    attention: Module.Config = FlexAttention.Config() if flex else CausalAttention.Config()
    return ModelSpec(
        name=kind,
        flavor=folder.name,
        model=build(hf, max_seq_len=max_seq_len, inner_attention=attention, value_head=value_head),
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=adapter,
    )
