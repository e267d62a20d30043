"""What a trainer's loss and its terms are given of the configuration."""

from collections.abc import Mapping
from typing import Any

from meshy.algorithms.interface import LossConfig
from meshy.training.config import TrainerConfig


def loss_config(config: TrainerConfig, options: Mapping[str, Any]) -> LossConfig:
    """options: of this one alone."""
    return LossConfig(
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        aggregation=config.aggregation,
        aggregation_constant=config.aggregation_constant,
        options=options,
    )
