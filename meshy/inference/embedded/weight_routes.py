"""What answers on the paths that change weights, check them, or release their memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from meshy.generation.in_thread import in_thread
from meshy.generation.shared_tensors import PayloadError, SegmentReader
from meshy.generation.update_group import GroupError
from meshy.inference.embedded import information
from meshy.inference.embedded.engine import MEMORY, Engine
from meshy.inference.embedded.groups import UpdateGroups, incoming
from meshy.inference.embedded.http import Answer, Call, Handler, as_json, done
from meshy.inference.embedded.request import RequestError
from meshy.inference.embedded.session import Named, UpdateSession
from meshy.inference.embedded.weights import WeightError, WeightUpdate

FROM_TENSOR, FROM_BROADCAST = "update_weights_from_tensor", "update_weights_from_distributed"

T = TypeVar("T")


class WeightRoutes:
    """`model_path` is the folder that the weights were last loaded from."""

    def __init__(self, engine: Engine, model_path: Path) -> None:
        self.model_path = str(model_path)
        self._engine = engine
        self._session = UpdateSession(engine)
        self._segments = SegmentReader()
        self._groups = UpdateGroups(engine.runner.device)
        self._receiving = asyncio.Lock()  # they share the memory that is received into

    def routes(self) -> dict[tuple[str, str], Handler]:
        return {
            ("POST", "/update_weights_from_disk"): self._from_disk,
            ("POST", "/begin_weight_update"): self._begin,
            ("POST", "/end_weight_update"): self._end,
            ("POST", "/update_weights_from_tensor"): self._from_tensor,
            ("POST", "/init_weights_update_group"): self._join,
            ("POST", "/update_weights_from_distributed"): self._from_broadcast,
            ("POST", "/destroy_weights_update_group"): self._leave,
            ("POST", "/update_weight_version"): self._set_version,
            ("POST", "/weights_checker"): self._check,
            ("POST", "/release_memory_occupation"): self._release,
            ("POST", "/resume_memory_occupation"): self._resume,
        }

    # Updates ----------------------------------------------------------------------------------------------------------

    async def _from_disk(self, call: Call) -> Answer:
        path, version = field(call, "model_path", str), version_of(call)
        update = WeightUpdate(
            folder=Path(path),
            version=version,
            flush_cache=bool(call.body.get("flush_cache", True)),
            abort_all=aborts(call),
        )
        try:
            await done(self._engine.update_weights(update))
        except (WeightError, RequestError) as error:
            return outcome(False, str(error), num_paused_requests=0)
        self.model_path = path
        return outcome(True, "Succeeded to update model weights." + told(version), num_paused_requests=0)

    async def _begin(self, call: Call) -> Answer:
        return await self._bracket(self._session.begin)

    async def _end(self, call: Call) -> Answer:
        return await self._bracket(self._session.end)

    async def _bracket(self, step: Any) -> Answer:
        try:
            await done(self._engine.exclusive(step))
        except RequestError as error:
            return outcome(False, str(error))
        return outcome(True, "Success")

    async def _from_tensor(self, call: Call) -> Answer:
        payloads = field(call, "serialized_named_tensors", list)
        if len(payloads) != 1 or not isinstance(payloads[0], str):
            raise RequestError("serialized_named_tensors must hold one base64 string, since the server is one rank.")
        if call.body.get("load_format") is not None:
            raise RequestError(f"The embedded engine does not know load_format {call.body['load_format']!r} here.")
        try:
            await done(self._engine.call(lambda: self._session.require(FROM_TENSOR)))
            named = self._segments.read(payloads[0])
            await done(self._engine.exclusive(self._loading(call, FROM_TENSOR, named), abort_all=aborts(call)))
        except (WeightError, RequestError, PayloadError) as error:
            return outcome(False, str(error))
        return outcome(True, "Success" + told(version_of(call)))

    async def _from_broadcast(self, call: Call) -> Answer:
        lists = [field(call, name, list) for name in ("names", "dtypes", "shapes")]
        group, form = self._group_of(call), call.body.get("load_format")
        if form not in (None, "flattened_bucket"):
            raise RequestError(f"The embedded engine does not know load_format {form!r}.")
        coming, packed = incoming(*lists), form is not None
        try:
            self._session.require(FROM_BROADCAST)  # before anything is waited for
            async with self._receiving:
                await self._receive(call, group, coming, packed)
        except GroupError as error:
            return outcome(False, f"Failed to receive weights: {error}")
        except (WeightError, RequestError) as error:
            return outcome(False, str(error))
        return outcome(True, "Succeeded to update parameter online." + told(version_of(call)))

    async def _receive(self, call: Call, group: str, coming: Named, packed: bool) -> None:
        """Where nothing needs to be converted, into the live tensors themselves, which nobody uses meanwhile."""
        places = await done(
            self._engine.hold(lambda: {} if packed else self._session.places_for(coming), abort_all=aborts(call))
        )
        try:
            named = await in_thread(lambda: self._groups.receive(group, coming, places, packed))
        except BaseException:
            await done(self._engine.let_go(lambda: self._session.miss(name for name, _ in coming)))
            raise
        await done(self._engine.let_go(self._loading(call, FROM_BROADCAST, named)))

    def _loading(self, call: Call, command: str, named: Named) -> Callable[[], None]:
        version, flush = version_of(call), bool(call.body.get("flush_cache", True))
        return lambda: self._session.load(command, named, version, flush)

    async def _join(self, call: Call) -> Answer:
        name, address = self._group_of(call), field(call, "master_address", str)
        port, rank, size = (field(call, key, int) for key in ("master_port", "rank_offset", "world_size"))
        backend = str(call.body.get("backend", "nccl"))
        try:
            await in_thread(lambda: self._groups.join(name, address, port, rank, size, backend))
        except GroupError as error:
            return outcome(False, f"Failed to initialize custom process group: {error}.")
        return outcome(True, "Succeeded to initialize custom process group.")

    async def _leave(self, call: Call) -> Answer:
        there = await in_thread(lambda: self._groups.leave(self._group_of(call)))
        return (
            outcome(True, "Succeeded to destroy custom process group.")
            if there
            else outcome(False, "The group to be destroyed does not exist.")
        )

    def _group_of(self, call: Call) -> str:
        return str(call.body.get("group_name", "weight_update_group"))

    # The rest ---------------------------------------------------------------------------------------------------------

    async def _set_version(self, call: Call) -> Answer:
        version = call.body.get("new_version")
        if version is None:
            raise RequestError("update_weight_version needs a new_version.")
        if call.body.get("abort_all_requests", True):
            await done(self._engine.abort(None))
        await done(self._engine.call(lambda: setattr(self._engine, "weight_version", str(version))))
        return outcome(True, f"Weight version updated to {version}", new_version=str(version))

    async def _check(self, call: Call) -> Answer:
        if call.body.get("action") != "checksum":
            raise RequestError(f"The embedded engine knows only action 'checksum', not {call.body.get('action')!r}.")
        return as_json(information.weights_check(await done(self._engine.call(self._engine.runner.checksums))))

    async def _release(self, call: Call) -> Answer:
        await done(self._engine.release(memory_tags(call.body)))
        return as_json(None)

    async def _resume(self, call: Call) -> Answer:
        await done(self._engine.take_memory(memory_tags(call.body)))
        return as_json(None)


def outcome(success: bool, message: str, **more: Any) -> Answer:
    """SGLang's answer to a command about weights."""
    return as_json({"success": success, "message": message, **more}, 200 if success else 400)


def told(version: str | None) -> str:
    return "" if version is None else f" Weight version updated to {version}."


def aborts(call: Call) -> bool:
    return bool(call.body.get("abort_all_requests", False))


def version_of(call: Call) -> str | None:
    version = call.body.get("weight_version")
    return None if version is None else str(version)


def field(call: Call, name: str, kind: type[T]) -> T:
    """A field that must be there. Raises RequestError."""
    value = call.body.get(name)
    if not isinstance(value, kind):
        raise RequestError(f"The request needs the field {name!r} ({kind.__name__}), got {value!r}.")
    return value


def memory_tags(body: dict[str, Any]) -> set[str]:
    tags = set(body.get("tags") or MEMORY)
    if not tags <= MEMORY:
        raise RequestError(f"Unknown memory tags {sorted(tags - MEMORY)}; known are {sorted(MEMORY)}.")
    return tags
