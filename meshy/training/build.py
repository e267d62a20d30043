"""From configuration to a learner. Importing this imports TorchTitan."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from meshy.algorithms.interface import LossConfig
from meshy.columns import Column
from meshy.device import device_kind
from meshy.importing import load
from meshy.spmd.groups import ProcessGroups
from meshy.titan.engine import AdamW, EngineConfig, TitanEngine
from meshy.training.config import TrainerConfig
from meshy.training.learner import Learner, Term


def micro_batch_budget(config: TrainerConfig, context_length: int) -> int:
    """Tokens of one forward pass."""
    if config.tokens_per_micro_batch is not None:
        return config.tokens_per_micro_batch
    return max(16384 if device_kind() == "cuda" else 1024, context_length)


def engine_config(
    config: TrainerConfig, model: Path, context_length: int, seed: int, deterministic: bool
) -> EngineConfig:
    """Resolves what the configuration leaves to the machine."""
    on_gpu = device_kind() == "cuda"
    precision = config.mixed_precision
    if precision == "auto":
        precision = "bfloat16" if on_gpu else "float32"
    return EngineConfig(
        model=model,
        max_seq_len=context_length,
        packed=config.packing == "packed",
        dtype=config.dtype,
        mixed_precision=precision,
        activation_checkpointing=config.activation_checkpointing,
        spmd_backend=config.spmd_backend,
        compile=config.compile,
        deterministic=deterministic and on_gpu,
        optimizer=AdamW(
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
        ),
        seed=seed,
    )


def build_learner(
    config: TrainerConfig,
    *,
    model: Path,
    context_length: int,
    temperature: float,
    seed: int,
    deterministic: bool,
    groups: ProcessGroups,
    columns: Mapping[str, Column],
) -> Learner:
    """Builds the engine on every rank (collective) and joins it with the loss that the configuration names."""
    engine = TitanEngine(engine_config(config, model, context_length, seed, deterministic))
    loss_config = LossConfig(
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        aggregation=config.aggregation,
        aggregation_constant=config.aggregation_constant,
        options=config.loss_options,
    )
    return Learner(
        engine=engine,
        groups=groups,
        loss=load(config.loss),
        loss_config=loss_config,
        terms=tuple(
            Term(term.label, load(term.loss), replace(loss_config, options=term.options), term.weight)
            for term in config.terms
        ),
        temperature=temperature,
        micro_batch_tokens=micro_batch_budget(config, context_length),
        old_logprobs=config.old_logprobs,
        correction=config.correction,
        columns=columns,
    )
