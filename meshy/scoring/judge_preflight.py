"""What is wrong with a judge, as seen from the host on which it will run, before anything is spawned. Torch-free."""

from __future__ import annotations

import os

from meshy.importing import ImportPathError, load, path_of
from meshy.scoring.judge_config import JudgeConfig


def judge_faults(config: JudgeConfig) -> list[str]:
    """Functions that cannot be loaded, and a key that is not there."""
    faults = []
    for field, target in (("prompt", config.prompt), ("parse", config.parse)):
        try:
            if not callable(load(target)):
                faults.append(f"{field}: {path_of(target)} is no function")
        except ImportPathError as error:
            faults.append(f"{field}: {error}")
        except Exception as error:  # noqa: BLE001 - whatever a module of the user raises
            faults.append(f"{field}: importing {path_of(target)} raised {type(error).__name__}: {error}")
    if config.api_key_env is not None and not os.environ.get(config.api_key_env):
        faults.append(f"api_key_env: the environment has no {config.api_key_env}; set it, or leave api_key_env out")
    return faults
