"""From configuration to a learner. Importing this imports TorchTitan."""

from collections.abc import Mapping
from pathlib import Path

from meshy.columns import Column
from meshy.device import device_kind
from meshy.importing import load
from meshy.spmd.groups import ProcessGroups
from meshy.titan.engine import AdamW, EngineConfig, TitanEngine
from meshy.training.config import TrainerConfig
from meshy.training.learner import Learner, Term
from meshy.training.settings_of_loss import loss_config


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
    return Learner(
        engine=engine,
        groups=groups,
        loss=load(config.loss),
        loss_config=loss_config(config, config.loss_options),
        terms=tuple(
            Term(term.label, load(term.loss), loss_config(config, term.options), term.weight) for term in config.terms
        ),
        temperature=temperature,
        micro_batch_tokens=micro_batch_budget(config, context_length),
        old_logprobs=config.old_logprobs,
        correction=config.correction,
        columns=columns,
    )
