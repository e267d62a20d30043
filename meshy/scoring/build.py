"""From configuration to a model under TorchTitan. Importing this imports TorchTitan."""

from pathlib import Path

from meshy.device import device_kind
from meshy.recipe import Recipe
from meshy.scoring.config import ModelOptions
from meshy.titan.engine import AdamW, EngineConfig, TitanEngine


def build_engine(
    config: ModelOptions, folder: Path, recipe: Recipe, optimizer: AdamW | None = None, *, value_head: bool = False
) -> TitanEngine:
    """Collective. optimizer: None for a model that stays as it is. value_head: it gives one number a token."""
    on_gpu = device_kind() == "cuda"
    precision = config.mixed_precision
    if precision == "auto":
        precision = "bfloat16" if on_gpu else "float32"
    return TitanEngine(
        EngineConfig(
            model=folder,
            max_seq_len=recipe.context_length,
            packed=config.packing == "packed",
            optimizer=optimizer,
            value_head=value_head,
            dtype=config.dtype,
            mixed_precision=precision,
            spmd_backend=config.spmd_backend,
            compile=config.compile,
            deterministic=recipe.deterministic and on_gpu,
            seed=recipe.seed,
        )
    )
