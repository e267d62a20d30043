"""The folder of a run: which file is where, and how it is made."""

import json
import os
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from meshy.observe.jsonl import JsonlWriter, finite, plain

__all__ = ["JsonlWriter", "RunFolder", "RunFolderError", "read_json", "write_json"]


OWN_EVAL = "_eval.json"


class RunFolderError(Exception):
    """A run folder that cannot be made or is not one; the message says which and what to do."""


@dataclass(frozen=True)
class RunFolder:
    """Names of everything that a run leaves behind. Holds no state; make one from a path wherever it is needed."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.json"

    @property
    def topology(self) -> Path:
        return self.path / "topology.json"

    @property
    def metrics(self) -> Path:
        """One line a step, by the trainer."""
        return self.path / "metrics.jsonl"

    @property
    def evals(self) -> Path:
        """One line an evaluation: `weight_version, accuracy, count, seconds, response_length_mean`."""
        return self.path / "evals.jsonl"

    def own_eval(self, group: str) -> Path:
        """How well a model does that is not the policy: `accuracy, count, model, seconds`."""
        return self.path / f"{group}{OWN_EVAL}"

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories.jsonl"

    def ring(self, id: str) -> Path:
        """One line a turn: who held the GPUs of a ring, from when to when, and why."""
        return self.path / f"ring-{id}.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def timeline(self) -> Path:
        return self.path / "timeline"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def reward_curve(self) -> Path:
        return self.path / "reward_curve.png"

    def log(self, service: str) -> Path:
        return self.logs / f"{service}.log"

    def timeline_of(self, service: str) -> Path:
        return self.timeline / f"{service}.jsonl"

    def weights_of(self, version: int) -> Path:
        return self.weights / f"v{version}"

    def make(self) -> Self:
        """Makes the folder and its subfolders where missing. Raises RunFolderError when that is not possible."""
        try:
            for folder in (self.path, self.logs, self.weights, self.timeline, self.tensorboard):
                folder.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe-{os.getpid()}"
            probe.write_bytes(b"x")
            probe.unlink()
        except OSError as error:
            raise _unwritable(self.path, error) from error
        return self

    @classmethod
    def create(cls, recipe: str, run_dir: str | Path | None = None, root: str | Path = "runs") -> Self:
        """Makes the folder of a new run: `run_dir`, or `<root>/<recipe>-<YYYYmmdd-HHMMSS>`, absolute.

        Raises RunFolderError when it cannot be written, or when `run_dir` holds something already.
        """
        if run_dir is not None:
            path = Path(run_dir).expanduser().absolute()
            _refuse_if_full(path)
            return cls(path).make()
        base = Path(root).expanduser().absolute() / f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
        for number in range(1, 1000):
            path = base if number == 1 else base.with_name(f"{base.name}-{number}")
            if _claim(path):
                return cls(path).make()
        raise RunFolderError(f"no free name for a run folder like {base}; choose one with --run-dir PATH")

    @classmethod
    def probe(cls, recipe: str, run_dir: str | Path | None = None, root: str | Path = "runs") -> None:
        """Raises RunFolderError where `create` would, and leaves nothing behind."""
        path = Path(run_dir if run_dir is not None else root).expanduser().absolute()
        if run_dir is not None:
            _refuse_if_full(path)
        existing = next(p for p in (path, *path.parents) if p.exists())
        try:
            if not existing.is_dir():
                raise NotADirectoryError(20, f"{existing} is a file")
            with tempfile.TemporaryDirectory(prefix=".probe-", dir=existing):
                pass
        except OSError as error:
            raise _unwritable(path, error) from error

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """The folder of a run that exists. Raises RunFolderError when `path` is not one."""
        folder = cls(Path(path).expanduser().absolute())
        if not folder.path.is_dir():
            raise RunFolderError(
                f"there is no run folder {folder.path}; give the folder that the run printed at its start"
            )
        if not any(file.exists() for file in (folder.topology, folder.recipe, folder.summary)):
            raise RunFolderError(
                f"{folder.path} is not a run folder: it holds no topology.json, recipe.json or summary.json"
                + _runs_within(folder.path)
            )
        return folder


def _refuse_if_full(path: Path) -> None:
    if path.is_dir() and any(path.iterdir()):
        raise RunFolderError(
            f"the run folder {path} is not empty; a run starts in a folder of its own: "
            "choose another --run-dir, or remove that folder first"
        )


def _unwritable(path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"cannot write the run folder {path} ({error.strerror or error}); "
        "choose a folder that can be written with --run-dir PATH"
    )


def versions_in(weights: Path) -> list[int]:
    """The weight versions that are whole in this folder, ascending."""
    found = (re.fullmatch(r"v(\d+)", path.name) for path in weights.glob("v*"))
    return sorted(int(match[1]) for match in found if match)


def _claim(path: Path) -> bool:
    """Makes `path`; False when someone else has it. Two runs that start in one second both come through."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()
    except FileExistsError:
        if path.is_dir():
            return False
        raise RunFolderError(
            f"cannot make the run folder {path}: a part of that path is a file; choose another with --run-dir PATH"
        ) from None
    except OSError as error:
        raise RunFolderError(
            f"cannot make the run folder {path} ({error.strerror or error}); choose another with --run-dir PATH"
        ) from error
    return True


def _runs_within(path: Path) -> str:
    """A hint for who gave the folder of all runs instead of one run."""
    runs = sorted((file.parent for file in path.glob("*/topology.json")), key=lambda run: run.stat().st_mtime)
    return f"; it holds runs, the latest is {runs[-1]}" if runs else ""


def write_json(path: Path, value: Any) -> None:
    """Writes `value` so that a reader sees the whole file or none (NaN and infinities become null)."""
    text = json.dumps(finite(value), indent=2, allow_nan=False, default=plain)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text + "\n")
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    """The parsed file, or None when it does not exist. Raises RunFolderError when it is not JSON."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise RunFolderError(f"{path} is not JSON: {error}") from error
