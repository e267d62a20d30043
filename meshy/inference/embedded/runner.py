"""The model: one forward pass over a flat batch, with its cache and its weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from jaxtyping import Float
from torch import Tensor
from transformers import AutoModelForCausalLM

from meshy.device import give_back
from meshy.generation.checksum import checksums
from meshy.inference.embedded.attention import ATTENTION, SlotAttention
from meshy.inference.embedded.batch import FlatBatch
from meshy.inference.embedded.cache import SlotCache
from meshy.inference.embedded.request import RequestError
from meshy.inference.embedded.weights import LiveWeights

_SERVED_LAYERS = {"full_attention", "sliding_attention"}


class ModelRunner:
    """Owned by one thread. folder: a causal language model in Hugging Face format. dtype: None keeps the model's own.
    context_length: None takes the model's.
    """

    def __init__(
        self, folder: Path, *, device: torch.device, dtype: torch.dtype | None, slots: int, context_length: int | None
    ) -> None:
        transformers.utils.logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype or "auto", attn_implementation=ATTENTION, local_files_only=True
        )
        self.model.to(device).eval().requires_grad_(False)
        self.config = self.model.config.get_text_config()
        foreign = set(getattr(self.config, "layer_types", None) or ()) - _SERVED_LAYERS
        if foreign:
            raise ValueError(f"The embedded engine cannot serve {folder}: it has layers of type {sorted(foreign)}")
        self.device = device
        self.context_length = context_length or int(getattr(self.config, "max_position_embeddings", 0)) or 4096
        self.cache = SlotCache(slots, self.context_length)
        self.weights = LiveWeights(self.model)
        self._cache_released = False

    @property
    def vocab_size(self) -> int:
        """Ids below it have an embedding and a logit."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def ready(self) -> bool:
        """Whether weights and cache are in memory."""
        return not self.weights.parked and not self._cache_released

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, moves: Sequence[tuple[int, int]], length: int) -> Float[Tensor, "logits vocab"]:
        """Move slots, feed the batch, and return the wanted logits in float32. `length`: of the longest request."""
        if moves:
            self.cache.move(moves, min(length, self.cache.length))
        self.cache.reserve(length)
        tokens, positions, rows = (
            torch.from_numpy(array).to(self.device) for array in (batch.tokens, batch.positions, batch.logit_rows)
        )
        out = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            logits_to_keep=rows,
            use_cache=False,
            slots=SlotAttention(batch, self.cache, self.device),
        )
        return out.logits[0].float()

    def checksums(self) -> dict[str, str]:
        """Of the live tensors, by name. Raises RequestError while they are released."""
        if self.weights.parked:
            raise RequestError("The weights are released; resume them before asking for their checksums.")
        return checksums(self.weights.tensors.items())

    def release(self, tags: set[str]) -> None:
        """Give back the memory of `weights`, `kv_cache` or both."""
        if "kv_cache" in tags:
            self.cache.clear()
            self._cache_released = True
        if "weights" in tags:
            self.weights.park()
        give_back(self.device)

    def resume(self, tags: set[str]) -> None:
        """Take it again; weights come back as they were."""
        if "kv_cache" in tags:
            self._cache_released = False
        if "weights" in tags:
            self.weights.restore()
