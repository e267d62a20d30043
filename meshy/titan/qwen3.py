"""Dense Qwen3 (arXiv 2505.09388): grouped-query attention with normalised queries and keys, no biases, SwiGLU."""

from functools import partial
from typing import Any

from torch import nn
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import GQAttention, QKVLinear
from torchtitan.models.common.config_utils import make_ffn_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.module import Module

from meshy.titan.policy_model import Head, PolicyModel
from meshy.trainable import VALUE, head_dim, rope_theta


class Qwen3Adapter(Qwen3StateDictAdapter):
    """TorchTitan's names, and a value head's where the model has one."""

    def __init__(self, model_config: PolicyModel.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        if model_config.value_head:
            self.from_hf_map[VALUE] = self.from_hf_map.pop("lm_head.weight")


def qwen3_config(
    hf: dict[str, Any], *, max_seq_len: int, inner_attention: Module.Config, value_head: bool
) -> PolicyModel.Config:
    """`hf` is the parsed config.json."""
    return decoder_config(
        hf,
        max_seq_len=max_seq_len,
        inner_attention=inner_attention,
        value_head=value_head,
        qkv_bias=False,
        qk_norm=True,
    )


def decoder_config(
    hf: dict[str, Any],
    *,
    max_seq_len: int,
    inner_attention: Module.Config,
    value_head: bool,
    qkv_bias: bool,
    qk_norm: bool,
) -> PolicyModel.Config:
    """The decoder that the Qwen family shares; sizes come from config.json. value_head: the last layer gives one number
    a token instead of logits; 0 for all where the folder has no weights for it."""
    dim, layers, vocab, per_head = hf["hidden_size"], hf["num_hidden_layers"], hf["vocab_size"], head_dim(hf)
    init = {"weight": partial(nn.init.normal_, std=hf.get("initializer_range", 0.02)), "bias": nn.init.zeros_}
    tied = bool(hf.get("tie_word_embeddings", False)) and not value_head
    last = {"weight": nn.init.zeros_} if value_head else init

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=hf["rms_norm_eps"], param_init={"weight": nn.init.ones_})

    def block() -> Qwen3TransformerBlock.Config:
        return Qwen3TransformerBlock.Config(
            attention_norm=norm(dim),
            ffn_norm=norm(dim),
            attention=GQAttention.Config(
                n_heads=hf["num_attention_heads"],
                n_kv_heads=hf["num_key_value_heads"],
                head_dim=per_head,
                dim=dim,
                qkv_linear=QKVLinear.Config(
                    head_dim=per_head,
                    wq=linear(dim, hf["num_attention_heads"] * per_head, init, bias=qkv_bias),
                    wkv=linear(dim, hf["num_key_value_heads"] * per_head, init, bias=qkv_bias),
                ),
                wo=linear(hf["num_attention_heads"] * per_head, dim, init),
                qk_norm=norm(per_head) if qk_norm else None,
                inner_attention=inner_attention,
                rope=CosSinRoPE.Config(dim=per_head, max_seq_len=max_seq_len, theta=rope_theta(hf)),
            ),
            feed_forward=make_ffn_config(
                dim=dim, hidden_dim=hf["intermediate_size"], w1_param_init=init, w2w3_param_init=init
            ),
        )

    return PolicyModel.Config(
        vocab_size=vocab,
        dim=dim,
        norm=norm(dim),
        enable_weight_tying=tied,
        value_head=value_head,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab, embedding_dim=dim, param_init={"weight": skip_param_init if tied else init["weight"]}
        ),
        lm_head=Head.Config(
            in_features=dim, out_features=1 if value_head else vocab, param_init={"weight": last["weight"]}
        ),
        layers=[block() for _ in range(layers)],
    )


def linear(in_features: int, out_features: int, init: dict[str, Any], *, bias: bool = False) -> Linear.Config:
    """A linear layer's config; `init` may name a bias that the layer does not have."""
    used = init if bias else {"weight": init["weight"]}
    return Linear.Config(in_features=in_features, out_features=out_features, bias=bias, param_init=used)
