"""Requests to the queue's processes, each with a deadline and an error that names who did not answer."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq
import zmq.asyncio

from meshy.queue.codec import Packed, from_wire, join
from meshy.queue.endpoints import CONTROLLER, Endpoints, storage_role
from meshy.queue.errors import BY_NAME, QueueError, QueueUnreachable
from meshy.queue.transferqueue import STORAGE_CLIENT_PREFIX, Message, MessageType, Role, ServerInfo, SocketPool


def sender_of(caller: str, life: str) -> str:
    """How the queue knows a client. life: of its process, where it matters which one of them it was."""
    return f"{caller}/{life}" if life else caller


class Wire:
    """One client's sockets. Belongs to the event loop in which it is used.

    deadline: seconds that any one request may take.
    """

    def __init__(self, endpoints: Endpoints, caller: str, deadline: float, life: str = "") -> None:
        self.endpoints = endpoints
        self.caller = caller
        self._sender = sender_of(caller, life)
        self.deadline = deadline
        self.context = zmq.asyncio.Context(io_threads=1)
        identity = f"{STORAGE_CLIENT_PREFIX}{caller}_{uuid.uuid4().hex[:8]}"
        self._pool = SocketPool(self.context, identity, "request")
        self._peers = {CONTROLLER: self._peer(CONTROLLER, endpoints.controller.request)}
        for unit, endpoint in enumerate(endpoints.storage):
            self._peers[storage_role(unit)] = self._peer(storage_role(unit), endpoint.request)

    def _peer(self, role: str, port: int) -> Any:
        host = self.endpoints.host_of(role)
        kind = Role.CONTROLLER if role == CONTROLLER else Role.STORAGE
        return ServerInfo(kind, self.endpoints.address(role), host, {"request": port})

    async def controller(self, operation: str, **body: Any) -> dict[str, Any]:
        """Have the controller do one of `controller.OPERATIONS`. Raises what it raised there."""
        return await self._request(CONTROLLER, MessageType.GET_META, operation, {"operation": operation, **body})

    async def _request(self, role: str, kind: Any, what: str, body: dict[str, Any]) -> dict[str, Any]:
        peer = self._peers[role]
        message = Message.create(request_type=kind, sender_id=self._sender, receiver_id=peer.id, body=body)
        loop, half = asyncio.get_running_loop(), self.deadline / 2
        try:
            # In halves: a process that was stopped for longer has the second one to find the answer that has come.
            async with asyncio.timeout(None) as limit:  # cheaper than wait_for, which would start a task
                first = loop.call_later(half, lambda: limit.reschedule(loop.time() + half))
                try:
                    answer = await self._exchange(peer, message)
                finally:
                    first.cancel()
        except TimeoutError:
            raise QueueUnreachable(
                f"{self.caller}: the queue's {role} (tcp://{peer.ip}:{peer.ports['request']}, {peer.id}) did not "
                f"answer {what!r} within {self.deadline:g} s; see its log, and whether its process lives"
            ) from None
        if "error" in answer.body:
            name, text = answer.body["error"]
            raise BY_NAME.get(name, QueueError)(f"{self.caller}: {text}")
        if "message" in answer.body:  # TransferQueue's own error reply
            raise QueueError(f"{self.caller}: the queue's {role} failed at {what!r}: {answer.body['message']}")
        return answer.body

    async def _exchange(self, peer: Any, message: Any) -> Any:
        async with self._pool.alease(peer) as socket:
            await socket.send_multipart(message.serialize(), copy=False)
            return Message.deserialize(await socket.recv_multipart(copy=False))

    # Storage ----------------------------------------------------------------------------------------------------------

    def _routes(self, indexes: Sequence[int]) -> dict[int, list[int]]:
        """Storage unit -> the positions in `indexes` that lie on it. TransferQueue's rule: row r is on unit r mod n."""
        units = len(self.endpoints.storage)
        routes: dict[int, list[int]] = {}
        for position, index in enumerate(indexes):
            routes.setdefault(index % units, []).append(position)
        return routes

    async def _scatter(
        self,
        kind: Any,
        what: str,
        indexes: Sequence[int],
        uids: Sequence[str],
        body: Callable[[list[int]], dict[str, Any]],
    ) -> dict[int, dict[str, Any]]:
        """Ask every unit that holds some of the rows; `body` makes the request for the rows at some positions."""

        async def ask(unit: int, positions: list[int]) -> tuple[int, dict[str, Any]]:
            rows = {"global_indexes": [indexes[i] for i in positions], "uids": [uids[i] for i in positions]}
            return unit, await self._request(storage_role(unit), kind, what, rows | body(positions))

        asked = [ask(unit, positions) for unit, positions in self._routes(indexes).items()]
        return dict([await asked[0]] if len(asked) == 1 else await asyncio.gather(*asked))

    async def put(
        self, indexes: Sequence[int], uids: Sequence[str], columns: Mapping[str, Packed], serial: int | None = None
    ) -> None:
        """Write columns into rows; with the serial number of their reservation, create the rows."""

        def share(positions: list[int]) -> dict[str, Any]:
            whole = len(positions) == len(indexes)
            packed = {name: (c if whole else c.select(positions)).wire() for name, c in columns.items()}
            return {"columns": packed, "serial": serial}

        await self._scatter(MessageType.PUT_DATA, "put", indexes, uids, share)

    async def get(
        self, indexes: Sequence[int], uids: Sequence[str], columns: Sequence[str], optional: Sequence[str] = ()
    ) -> tuple[dict[str, Packed], dict[str, list[Any]]]:
        """The columns; and of each optional one its rows, as `Packed.rows` gives them, None where a row lacks it."""
        wanted = {"fields": list(columns), "optional": list(optional)}
        answers = await self._scatter(MessageType.GET_DATA, "read", indexes, uids, lambda _: wanted)
        routes = self._routes(indexes) if optional or len(answers) > 1 else {}
        sparse: dict[str, list[Any]] = {name: [None] * len(indexes) for name in optional}
        for unit, answer in answers.items():
            for name, positions in answer["there"].items():
                found = from_wire(answer["columns"][name]).rows() if positions else []
                for position, row in zip(positions, found, strict=True):
                    sparse[name][routes[unit][position]] = row
        if len(answers) == 1:
            (answer,) = answers.values()
            return {name: from_wire(answer["columns"][name]) for name in columns}, sparse
        packed = {}
        for name in columns:
            rows: list[Any] = [None] * len(indexes)
            for unit, answer in answers.items():
                for position, row in zip(routes[unit], from_wire(answer["columns"][name]).rows(), strict=True):
                    rows[position] = row
            packed[name] = join(rows)
        return packed, sparse

    async def clear(self, indexes: Sequence[int], uids: Sequence[str]) -> None:
        await self._scatter(MessageType.CLEAR_DATA, "clear", indexes, uids, lambda _: {})

    async def banish(self, sender: str) -> None:
        """When it returns, nothing of that sender's is done any more, by any process of the queue."""
        body: dict[str, Any] = {"global_indexes": [], "uids": [], "banish": sender}
        units = range(len(self.endpoints.storage))
        await asyncio.gather(*(self._request(storage_role(u), MessageType.CLEAR_DATA, "banish", body) for u in units))
        # Last, for it gives the sender's rows to others, into whose work no storage unit may write any more.
        await self.controller("banish", sender=sender)

    async def ping_storage(self) -> None:
        """Raise unless every storage unit answers to its name."""
        body: dict[str, Any] = {"global_indexes": [], "uids": [], "fields": []}
        units = range(len(self.endpoints.storage))
        await asyncio.gather(*(self._request(storage_role(u), MessageType.GET_DATA, "hello", body) for u in units))

    def close(self) -> None:
        self._pool.close()
        self.context.destroy(linger=0)
