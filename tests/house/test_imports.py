"""The walls of the house: who may import what."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "meshy"
ROLES = {"inference", "training", "rollout", "scoring"}
PURE = {"recipe.py", "columns.py", "contract.py", "topology.py", "settings.py", "importing.py", "refusals.py"}
HEAVY = {"torch", "zmq", "transfer_queue", "transformers", "torchtitan", "numpy", "fastapi", "httpx", "tensordict"}


def imports() -> Iterator[tuple[str, int, str]]:
    """(file within the package, line, imported module) of every import statement, wherever it stands."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield file.relative_to(PACKAGE).as_posix(), node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield file.relative_to(PACKAGE).as_posix(), node.lineno, node.module
                for alias in node.names:  # `from meshy import training`
                    yield file.relative_to(PACKAGE).as_posix(), node.lineno, f"{node.module}.{alias.name}"


IMPORTS = list(imports())


def breaches(rule) -> list[str]:
    return [f"{file}:{line} imports {module}" for file, line, module in IMPORTS if rule(file, module)]


def test_there_is_something_to_look_at() -> None:
    assert len(IMPORTS) > 100


def test_pure_modules_and_configs_import_nothing_heavy() -> None:
    assert not breaches(
        lambda file, module: (file in PURE or file.endswith("config.py")) and module.split(".")[0] in HEAVY
    )


def test_only_the_queue_imports_transfer_queue() -> None:
    assert not breaches(lambda file, module: module.split(".")[0] == "transfer_queue" and not file.startswith("queue/"))


def test_roles_never_import_one_another() -> None:
    def rule(file: str, module: str) -> bool:
        here, parts = file.split("/")[0], module.split(".")
        return here in ROLES and parts[0] == "meshy" and len(parts) > 1 and parts[1] in ROLES - {here}

    assert not breaches(rule)


def test_shared_rooms_know_no_role() -> None:
    def rule(file: str, module: str) -> bool:
        here, parts = file.split("/")[0], module.split(".")
        return here not in ROLES and parts[0] == "meshy" and len(parts) > 1 and parts[1] in ROLES

    assert not breaches(rule)


def test_only_titan_imports_torchtitan() -> None:
    assert not breaches(lambda file, module: module.split(".")[0] == "torchtitan" and not file.startswith("titan/"))


def test_algorithms_know_torch_only() -> None:
    def rule(file: str, module: str) -> bool:
        known = set(sys.stdlib_module_names) | {"torch", "jaxtyping"}
        inside = module.startswith("meshy.algorithms")
        return file.startswith("algorithms/") and module.split(".")[0] not in known and not inside

    assert not breaches(rule)


def test_nothing_imports_ray() -> None:
    assert not breaches(lambda file, module: module.split(".")[0] == "ray")


@pytest.mark.e2e
def test_ray_is_nowhere_once_the_queue_is_loaded() -> None:
    code = (
        "import sys, importlib.util\n"
        "import meshy.queue.sync, meshy.queue.controller, meshy.queue.storage\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'ray'], 'ray is in sys.modules'\n"
        "assert importlib.util.find_spec('ray') is None, 'ray can be imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


CONFIGS = sorted(file for role in ROLES for file in (PACKAGE / role).glob("*config.py"))


@pytest.mark.parametrize("config", [".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in CONFIGS])
def test_a_role_is_configured_without_torch(config: str) -> None:
    code = f"import sys, meshy.{config}; assert not {HEAVY!r} & set(sys.modules), {HEAVY!r} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_role_has_a_config() -> None:
    assert {file.parent.name for file in CONFIGS} == ROLES
