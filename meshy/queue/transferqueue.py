"""The one module that imports TransferQueue 0.1.11, without Ray.

The package imports `ray` unconditionally, though its controller and storage unit are plain classes with threads, and
`tensordict`, which takes longer than torch itself and which we never send. Stand-ins for both exist only while
TransferQueue's modules are imported; afterwards neither name is in `sys.modules`, so nobody else is fooled. The
package's `__init__` (Ray entry points, data loaders, other storage backends) is not run either: we import the few
modules that we extend. Together this saves half of the start-up time and 150 MB in every process.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

VERSION = "0.1.11"


def _ray() -> dict[str, ModuleType]:
    ray, util, scheduling = (ModuleType(n) for n in ("ray", "ray.util", "ray.util.scheduling_strategies"))

    def remote(*args: Any, **options: Any) -> Any:
        """Both forms of the decorator leave the class as it is."""
        return args[0] if args and isinstance(args[0], type) else lambda cls: cls

    for package in (ray, util):
        package.__path__ = []
    ray.__dict__.update(remote=remote, ObjectRef=object, util=util)
    util.__dict__.update(scheduling_strategies=scheduling)
    scheduling.__dict__.update(NodeAffinitySchedulingStrategy=type("NodeAffinitySchedulingStrategy", (), {}))
    return {module.__name__: module for module in (ray, util, scheduling)}


def _tensordict() -> dict[str, ModuleType]:
    module = ModuleType("tensordict")
    for name in ("TensorDict", "TensorDictBase", "NonTensorStack"):
        module.__dict__[name] = type(name, (), {})
    return {"tensordict": module}


def _bare_packages() -> dict[str, ModuleType]:
    """`transfer_queue` and `transfer_queue.storage` as folders to import from, without running their `__init__`."""
    spec = importlib.util.find_spec("transfer_queue")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            f"TransferQueue is not installed: pip install --no-deps transferqueue=={VERSION} (make setup does it)"
        )
    version = importlib.metadata.version("transferqueue")
    if version != VERSION:
        raise ImportError(f"meshy.queue extends TransferQueue {VERSION}, but {version} is installed")
    folder = spec.submodule_search_locations[0]
    packages = {}
    for name, path in (("transfer_queue", folder), ("transfer_queue.storage", f"{folder}/storage")):
        packages[name] = ModuleType(name)
        packages[name].__path__ = [path]
    return packages


@contextmanager
def _stand_ins() -> Iterator[None]:
    modules = _ray()
    if "tensordict" not in sys.modules:
        modules |= _tensordict()
    saved = {name: sys.modules.pop(name, None) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in saved.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def _import(*names: str) -> list[Any]:
    if "transfer_queue" not in sys.modules:
        sys.modules.update(_bare_packages())
    with _stand_ins():
        return [importlib.import_module(f"transfer_queue.{name}") for name in names]


_enums, _zmq = _import("utils.enum_utils", "utils.zmq_utils")

Role = _enums.Role
Message = _zmq.ZMQMessage
MessageType = _zmq.ZMQRequestType
ServerInfo = _zmq.ZMQServerInfo
SocketPool = _zmq.ZMQSocketPool
create_socket = _zmq.create_zmq_socket
tcp_address = _zmq.format_zmq_address
STORAGE_CLIENT_PREFIX: str = _zmq.STORAGE_MANAGER_IDENTITY_PREFIX
"""A storage unit drops messages from sockets whose identity begins otherwise."""


def server_modules() -> tuple[Any, Any]:
    """TransferQueue's `controller` and `storage.simple_storage` modules, which only the queue's processes need."""
    controller, storage = _import("controller", "storage.simple_storage")
    return controller, storage
