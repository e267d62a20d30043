"""The decoder as a policy: logits only where a loss needs them."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor
from torchtitan.models.qwen3 import Qwen3Model


class PolicyModel(Qwen3Model):
    """TorchTitan's Qwen3-shaped decoder (Qwen2 differs in its attention's config only) with `select`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        pass

    def forward(
        self,
        tokens: Int[Tensor, "batch seq"],
        positions: Int[Tensor, "batch seq"] | None = None,
        attention_masks: Any = None,
        select: Int[Tensor, " selected"] | None = None,
    ) -> Float[Tensor, "selected vocab"] | Float[Tensor, "batch seq vocab"]:
        """Logits of every token, or of those at the flat indices `select` into [batch * seq].

        Prompts and padding are often most of a batch, and the vocabulary is the widest matrix of the model.
        """
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden, attention_masks, positions)
        hidden = self.norm(hidden)
        if select is not None:
            hidden = hidden.flatten(0, 1).index_select(0, select)
        return self.lm_head(hidden)
