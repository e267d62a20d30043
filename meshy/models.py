"""Finding a model's folder on this host."""

from __future__ import annotations

import re
from pathlib import Path


class ModelError(ValueError):
    """A model that cannot be had here; the message says what to change."""


def model_folder(model: str) -> Path:
    """The folder in Hugging Face format that `model` names: a path, or a hub id (`Qwen/Qwen3-1.7B`).

    A hub id is looked up in the local cache first and downloaded otherwise. Raises ModelError.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} holds no config.json; give a folder in Hugging Face format")
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
