"""A model that stays as it is and says how likely it finds tokens: a teacher, or a reference."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshy.models import vocabulary_size
from meshy.scoring.config import TeacherConfig
from meshy.scoring.evaluation import evaluate_model
from meshy.scoring.likelihood import likelihoods
from meshy.scoring.service import ScoringService, by_row
from meshy.scoring.tokenizers import load_token_map
from meshy.service import Context
from meshy.service.exits import Unrecoverable
from meshy.titan.build import build_engine
from meshy.titan.micro_batch import MicroBatch, Sample
from meshy.titan.policy_model import LEAST_ROWS


class TeacherService(ScoringService):
    """Each rank scores its own rows by one forward pass, and never has the logits of more than `part_mb` at once."""

    config: TeacherConfig

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.columns = self.config.reads

    def load(self) -> None:
        config, recipe = self.config, self.recipe
        if config.evaluate and self.context.replica.index == 0:
            self.doing = "evaluating the model itself"
            self.alone(lambda: evaluate_model(self.context, self.folder, config.evaluate, self.device))
        self.engine = build_engine(config, self.folder, recipe)
        self.temperature = config.temperature or recipe.sampling.temperature
        self.token_map: Tensor | None = None
        if config.token_map is not None:
            self.token_map = torch.tensor(
                load_token_map(config.token_map, self.context.model_folder, self.folder), device=self.engine.device
            )
        self.vocab = vocabulary_size(self.context.model_folder)
        self.part = max(LEAST_ROWS, config.part_mb * 2**20 // (4 * vocabulary_size(self.folder)))

    def score(self, samples: Sequence[Sample]) -> Mapping[str, Sequence[Any]]:
        config = self.config
        names = [config.candidates] if "candidates" in config.scores else []
        batch = self.engine.batch(samples, names)
        reduce = likelihoods(
            config.scores,
            targets=batch.targets,
            candidates=batch.columns[names[0]].long() if names else None,
            k=config.k,
            temperature=self.temperature,
            vocab=self.vocab,
            token_map=self.token_map,
        )
        parts = self.engine.reduced(self._as_read(batch, samples), reduce, self.part)
        return {name: by_row(part, samples) for name, part in zip(config.columns, parts, strict=True)}

    def _as_read(self, batch: MicroBatch, samples: Sequence[Sample]) -> MicroBatch:
        """The batch in this model's own tokens."""
        if self.token_map is None:
            return batch
        for sample in samples:
            own = self.token_map[sample.tokens.to(self.token_map.device)]
            if bool((own < 0).any()):
                id = int(sample.tokens[(own < 0).nonzero()[0, 0]])
                raise Unrecoverable(
                    f"a row holds token {id} of the policy, for which token_map names no token of {self.folder}; map it"
                )
        return dataclasses.replace(batch, tokens=self.token_map[batch.tokens].clamp(min=0))
