"""What is wrong with an engine as seen from the host on which it will run, before anything is spawned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshy.device import device_kind
from meshy.importing import nearest
from meshy.inference.choice import choose
from meshy.inference.config import InferenceConfig
from meshy.inference.model_config import ModelConfig, read_model_config, sharding_faults
from meshy.inference.sglang.arguments import RESERVED, VERSION, as_arguments
from meshy.inference.sglang.interpreter import HOW_TO_INSTALL, InterpreterError, ask
from meshy.models import ModelError, model_folder
from meshy.recipe import Recipe


def engine_faults(config: InferenceConfig, recipe: Recipe) -> list[str]:
    """Every fault of the engine that the configuration leads to here."""
    on_gpu = device_kind() == "cuda"
    try:
        choice = choose(config, on_gpu)
        if choice.engine == "embedded":
            return _embedded_faults(config, recipe, choice.why)
        model = read_model_config(model_folder(recipe.model))
    except InterpreterError as error:
        return [str(error)]
    except ModelError:
        return []  # the ignitor has said so
    except (OSError, ValueError) as error:
        return [f"the model's config.json cannot be read: {error}"]
    faults = (
        sharding_faults(model, config.tp_of(recipe)) + reserved_faults(config) + ring_faults(config, recipe, on_gpu)
    )
    return faults + _sglang_faults(config, model, choice.python, on_gpu)


def reserved_faults(config: InferenceConfig) -> list[str]:
    """server_args that Meshy sets itself."""
    return [_reserved(name, name) for name in config.server_args if name in RESERVED]


def ring_faults(config: InferenceConfig, recipe: Recipe, on_gpu: bool) -> list[str]:
    """SGLang in a ring that could not let go of its GPUs."""
    if not config.ring(recipe) or config.saves_memory(recipe, on_gpu) or not on_gpu:
        return []
    return [
        "memory_saver: in a ring, SGLang must free its GPUs for the others, which takes its memory saver; leave it "
        "out, or set it to true"
    ]


def _reserved(name: str, field: str) -> str:
    instead = f"set {RESERVED[field]} instead" if RESERVED[field] else "leave it out"
    return f"server_args.{name}: Meshy sets this itself; {instead}"


def _embedded_faults(config: InferenceConfig, recipe: Recipe, why: str) -> list[str]:
    if config.gpus(recipe) <= 1:
        return []
    return [
        f"gpus_per_replica: the engine is the embedded one ({why}), which computes on one GPU; install SGLang, or set "
        "gpus_per_replica=1 and take more replicas"
    ]


def _sglang_faults(config: InferenceConfig, model: ModelConfig, python: Path, on_gpu: bool) -> list[str]:
    arguments = [] if not config.server_args else as_arguments({"model_path": model.folder, **config.server_args})
    remote = model.own_code and config.server_args.get("trust_remote_code")
    try:
        told = ask(
            python,
            names=list(config.server_args),
            arguments=arguments,
            architectures=[] if remote else list(model.architectures),
            gpu=on_gpu,
        )
    except InterpreterError as error:
        return [str(error)]
    return told_faults(told, config, model, python)


def told_faults(told: dict[str, Any], config: InferenceConfig, model: ModelConfig, python: Path) -> list[str]:
    """The faults in what an interpreter says of itself (see `sglang.probe`)."""
    if told["version"] is None:
        return [f"python: SGLang is not installed in {python}; {HOW_TO_INSTALL}, or set engine='embedded'"]
    if told["version"] != VERSION:
        return [f"python: {python} has SGLang {told['version']}, and Meshy supports {VERSION}; {HOW_TO_INSTALL}"]
    faults = [
        f"model: SGLang {VERSION} cannot load a {name} ({model.folder}/config.json), nor can transformers there; "
        "choose another model, or engine='embedded' if transformers here knows it"
        for name in told["unknown_architectures"]
    ]
    if told.get("sees_gpu") is False:
        faults.append(
            f"python: this machine has GPUs, but the torch of {python} sees none (a build for the CPU?); "
            f"{HOW_TO_INSTALL}"
        )
    options: dict[str, str] = told.get("options", {})
    for name in config.server_args if options else ():
        if name not in options:
            faults.append(f"server_args.{name}: SGLang {VERSION} has no such argument{nearest(name, options)}")
        elif name not in RESERVED and options[name] in RESERVED:  # another name for one of them
            faults.append(_reserved(name, options[name]))
    if told.get("refused"):
        faults.append(f"server_args: SGLang {VERSION} refuses them: {told['refused']}")
    return faults
