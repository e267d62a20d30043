"""From a role's configuration to its engine."""

from pathlib import Path
from typing import Literal

from meshy.device import device_kind
from meshy.engine_options import EngineOptions, OptimizerOptions
from meshy.recipe import Recipe
from meshy.titan.engine import AdamW, EngineConfig, TitanEngine


def build_engine(
    options: EngineOptions,
    model: Path,
    recipe: Recipe,
    *,
    value_head: bool = False,
    activation_checkpointing: Literal["none", "selective", "full"] = "none",
) -> TitanEngine:
    """Collective. With an optimiser where the options speak of one. value_head: it gives one number a token."""
    on_gpu = device_kind() == "cuda"
    precision = options.mixed_precision
    if precision == "auto":
        precision = "bfloat16" if on_gpu else "float32"
    return TitanEngine(
        EngineConfig(
            model=model,
            max_seq_len=recipe.context_length,
            packed=options.packing == "packed",
            optimizer=_adamw(options) if isinstance(options, OptimizerOptions) else None,
            value_head=value_head,
            dtype=options.dtype,
            mixed_precision=precision,
            activation_checkpointing=activation_checkpointing,
            spmd_backend=options.spmd_backend,
            compile=options.compile,
            deterministic=recipe.deterministic and on_gpu,
            seed=recipe.seed,
        )
    )


def _adamw(options: OptimizerOptions) -> AdamW:
    return AdamW(
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
    )


def micro_batch_tokens(options: EngineOptions, recipe: Recipe) -> int:
    """Of one forward pass."""
    if options.tokens_per_micro_batch is not None:
        return options.tokens_per_micro_batch
    return max(16384 if device_kind() == "cuda" else 1024, recipe.context_length)
