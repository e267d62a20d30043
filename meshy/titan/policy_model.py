"""The decoder as a policy: logits only where they are needed, and a part of them at a time where they are many."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torchtitan.models.common import Linear
from torchtitan.models.qwen3 import Qwen3Model

LEAST_ROWS = 4  # of a part: below, a linear layer on a CPU takes another kernel, with other rounding

Reduce = Callable[[Float[Tensor, "part out"], int, int], tuple[Tensor, ...]]
"""From the outputs of rows [start, stop) to what is kept of them: tensors with one entry a row."""


class Head(Linear):
    """The last layer. With `reduce`, its outputs are made and reduced `part` rows at a time, so that [rows, vocab] is
    never there whole."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(
        self, hidden: Float[Tensor, "rows dim"], reduce: Reduce | None = None, part: int = 0
    ) -> Float[Tensor, "rows out"] | tuple[Tensor, ...]:
        if reduce is None:
            return self._outputs(hidden)
        rows = hidden.shape[0]
        kept = []
        for start in range(0, max(rows, 1), part):  # once even without a row: what is kept has a shape
            rows_here = min(part, rows - start)
            some = hidden[start : start + rows_here]
            if rows_here < LEAST_ROWS:
                some = torch.cat([some, some.new_zeros(LEAST_ROWS - rows_here, some.shape[1])])
            kept.append(reduce(self._outputs(some)[:rows_here], start, start + rows_here))
        return tuple(torch.cat(parts) for parts in zip(*kept, strict=True))

    def _outputs(self, hidden: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows out"]:
        """A single output is summed row by row, for a product of matrix and vector rounds by how many rows there are;
        and in float32: differences of values are learnt from."""
        if self.weight.shape[0] == 1:
            return (hidden.float() * self.weight.float()).sum(-1, keepdim=True)
        return F.linear(hidden, self.weight, self.bias)


class PolicyModel(Qwen3Model):
    """TorchTitan's Qwen3-shaped decoder (Qwen2 differs in its attention's config only) with `select`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        value_head: bool = False

    def forward(
        self,
        tokens: Int[Tensor, "batch seq"],
        positions: Int[Tensor, "batch seq"] | None = None,
        attention_masks: Any = None,
        select: Int[Tensor, " selected"] | None = None,
        reduce: Reduce | None = None,
        part: int = 0,
    ) -> Float[Tensor, "selected vocab"] | Float[Tensor, "batch seq vocab"] | tuple[Tensor, ...]:
        """Logits of every token, or of those at the flat indices `select` into [batch * seq]; or what `reduce` keeps of
        them, `part` rows at a time.

        Prompts and padding are often most of a batch, and the vocabulary is the widest matrix of the model.
        """
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden, attention_masks, positions)
        hidden = self.norm(hidden)
        if select is not None:
            hidden = hidden.flatten(0, 1).index_select(0, select)
        return self.lm_head(hidden) if reduce is None else self.lm_head(hidden, reduce, part)
