"""What is wrong with a judge as seen from the host on which it will run, before anything is spawned. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from meshy.importing import ImportPathError, load, path_of
from meshy.scoring.judge_config import JudgeConfig


def judge_faults(config: JudgeConfig) -> list[str]:
    """A key that is not there, functions that cannot be loaded."""
    faults = []
    if config.api_key_env is not None and not os.environ.get(config.api_key_env, "").strip():
        faults.append(f"api_key_env: there is no environment variable {config.api_key_env} here; set it to the API key")
    return (
        faults
        + _function_faults("prompt", config.prompt, "from a RewardSample to a list of chat messages")
        + _function_faults("parse", config.parse, "from a text and a RewardSample to a number")
    )


def _function_faults(field: str, target: str | Callable[..., Any], what: str) -> list[str]:
    try:
        function = load(target)
    except ImportPathError as error:
        return [f"{field}: {error}"]
    except Exception as error:  # noqa: BLE001 - whatever a module of the user raises
        return [f"{field}: importing {path_of(target)} raised {type(error).__name__}: {error}"]
    if not callable(function):
        return [f"{field}: {path_of(target)} is a {type(function).__name__}; name a function {what}"]
    return []
