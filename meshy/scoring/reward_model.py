"""A reward model: a sequence classifier that stays as it is and gives each row one number, at its last token."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from meshy.models import read_config
from meshy.scoring.reward_model_config import RewardModelConfig
from meshy.scoring.service import ScoringService
from meshy.titan.build import build_engine
from meshy.titan.engine import TitanEngine
from meshy.titan.micro_batch import Sample, flat_index


class RewardModelService(ScoringService):
    """Each rank scores its own rows by one forward pass."""

    config: RewardModelConfig
    columns = ("tokens", "loss_mask")

    def load(self) -> None:
        self.engine = build_engine(self.config, self.folder, self.recipe, value_head=True)
        self.padding: int | None = read_config(self.folder).get("pad_token_id")

    def score(self, samples: Sequence[Sample]) -> Mapping[str, Sequence[Any]]:
        scores = last_scores(self.engine, samples, self.padding)
        return {self.config.column: list(clipped(scores, self.config.clip))}


def last_scores(engine: TitanEngine, samples: Sequence[Sample], padding: int | None) -> Float[Tensor, " samples"]:
    """What a model with a value head says at the last token of each sample, float32, on the CPU. Collective; without a
    sample too. padding: the id that the model takes for no token."""
    batch = engine.batch(samples)
    select = flat_index(samples, batch, [last_token(sample.tokens, padding) for sample in samples])
    at_last = dataclasses.replace(batch, select=select)
    return engine.values(at_last).cpu()


def last_token(tokens: Int[Tensor, " length"], padding: int | None) -> int:
    """The place of the last token that is not `padding`: a policy's end token may be just that id, and a classifier was
    trained to speak before it. 0 where there is none."""
    if padding is None:
        return len(tokens) - 1
    places = (tokens != padding).nonzero()
    return int(places[-1]) if len(places) else 0


def clipped(scores: Float[Tensor, " samples"], most: float | None) -> Float[Tensor, " samples"]:
    """Within plus and minus `most`. What is infinite stays so, and is refused: the model is broken."""
    return scores if most is None else torch.where(scores.isfinite(), scores.clamp(-most, most), scores)
