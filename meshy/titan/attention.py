"""Causal attention without a mask tensor: over padded rows, or document by document over packed rows."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torchtitan.protocols.module import Module


@dataclass(frozen=True)
class Documents:
    """Lengths, in order, of the documents of one packed row; they add up to its width."""

    lengths: tuple[int, ...]


class CausalAttention(Module):
    """SDPA with a causal mask only.

    Rows padded on the right need no other mask: a real token never attends to what comes after it. With `Documents`,
    the batch is one packed row and each document attends to itself alone; exact, with a cost of sum(length^2).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q: Float[Tensor, "batch seq heads dim"],
        k: Float[Tensor, "batch seq kv_heads dim"],
        v: Float[Tensor, "batch seq kv_heads dim"],
        *,
        attention_masks: Documents | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Float[Tensor, "batch seq heads dim"]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)

        if attention_masks is None:
            return attend(q, k, v).transpose(1, 2)
        parts = zip(*(x.split(attention_masks.lengths, dim=2) for x in (q, k, v)), strict=True)
        return torch.cat([attend(*part) for part in parts], dim=2).transpose(1, 2)
