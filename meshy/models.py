"""Finding a model's folder on this host, and seeing whether it is whole. Torch-free and quick."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ModelError(ValueError):
    """A model that cannot be had here; the message says what to change."""


def model_folder(model: str) -> Path:
    """The folder in Hugging Face format that `model` names: a path, or a hub id (`Qwen/Qwen3-1.7B`).

    A hub id is looked up in the local cache first and downloaded otherwise. Raises ModelError.
    """
    path = Path(model).expanduser()
    if not model.strip():
        raise ModelError(f"expected a folder in Hugging Face format or a hub id, got {model!r}")
    if path.is_dir():
        return path.resolve()
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith("."):
        raise ModelError(f"there is no model folder {path}; give a folder in Hugging Face format or a hub id")
    return _from_hub(model)


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    try:
        try:
            return Path(snapshot_download(model, allow_patterns=patterns, local_files_only=True))
        except LocalEntryNotFoundError:
            return Path(snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"there is no folder {model!r} here, and the hub does not give a model of that name "
            f"({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json. Raises ModelError."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ModelError(f"{folder} holds no config.json; give a folder in Hugging Face format") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds no JSON object")
    return config


def vocabulary_size(folder: Path) -> int:
    """Ids that the model has an embedding for, those beyond its tokenizer's among them. Raises ModelError."""
    size = read_config(folder).get("vocab_size")
    if type(size) is not int or size < 1:
        raise ModelError(f"{folder / 'config.json'}: vocab_size: expected a whole number of at least 1, got {size!r}")
    return size


TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def folder_faults(folder: Path) -> list[str]:
    """What keeps a folder from being a whole model in Hugging Face format: configuration, weights, tokenizer."""
    faults = []
    try:
        read_config(folder)
    except ModelError as error:
        faults.append(str(error))
        if not (folder / "config.json").is_file():
            return faults
    if not any((folder / name).is_file() for name in TOKENIZERS):
        faults.append(f"{folder} holds no tokenizer (none of {', '.join(TOKENIZERS)}); save the model's own beside it")
    return faults + _weight_faults(folder)


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of a tensor. dtype: such as "BF16"."""

    shape: tuple[int, ...]
    dtype: str


def weight_headers(folder: Path) -> dict[str, Header]:
    """Of every tensor in a folder's safetensors, without its numbers."""
    from safetensors import safe_open

    headers: dict[str, Header] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as weights:
            for name in weights.keys():  # noqa: SIM118
                tensor = weights.get_slice(name)
                headers[name] = Header(tuple(tensor.get_shape()), tensor.get_dtype())
    return headers


def _weight_faults(folder: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    try:
        named = json.loads(index.read_text())["weight_map"].values() if index.is_file() else ()
    except (ValueError, KeyError) as error:
        return [f"{index} is no index of weights ({type(error).__name__}: {error}); fetch the model again"]
    files = sorted({folder / name for name in named} | set(folder.glob("*.safetensors")))
    if not files:
        return [f"{folder} holds no *.safetensors file; convert the weights with transformers' save_pretrained"]
    faults = []
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (OSError, SafetensorError) as error:
            faults.append(f"{file} cannot be read ({error}); fetch or write the model again")
    return faults
