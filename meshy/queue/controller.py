"""TransferQueue's controller, extended: bounded rows that know their uids, takes of as much as is ready, a doorbell.

All of it runs in TransferQueue's request thread, under one lock that the admin endpoint shares. Calls ride on GET_META
messages whose body names an operation; what a client calls is written in `wire.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq

from meshy.columns import Contract
from meshy.queue.doorbell import topic
from meshy.queue.endpoints import CONTROLLER, Endpoints
from meshy.queue.errors import QueueError, Refused, UnknownName, WrongRun, banished
from meshy.queue.ledger import Ledger
from meshy.queue.transferqueue import MessageType, Role, ServerInfo, create_socket, server_modules, tcp_address

_controller, _ = server_modules()

OPERATIONS = (
    "hello",
    "ring",
    "reserve",
    "release",
    "commit",
    "take",
    "give_back",
    "mark_clearing_rows",
    "clear",
    "look",
    "banish",
    "table",
)

SIGNED = ("reserve", "take")
"""Operations that are told who sent them: what they give to a sender is taken back when it is banished."""


class Controller(_controller.TransferQueueController):
    """Serves the partitions of `contract` from construction on."""

    def __init__(self, endpoints: Endpoints, contract: Contract) -> None:
        self.endpoint = endpoints.controller
        self.address = endpoints.address(CONTROLLER)
        self.contract = contract
        self.ledgers: dict[str, Ledger] = {}
        self.lock = threading.Lock()
        self._serial = 0
        self._banished: set[str] = set()
        with self.lock:  # no request is served before the partitions are there
            super().__init__(polling_mode=True)
            for name, partition in contract.partitions.items():
                status = self.partitions[name] = _controller.DataPartitionStatus(partition_id=name)
                self.ledgers[name] = Ledger(partition, contract.capacity[name], status)

    def _init_zmq_socket(self) -> None:
        """As TransferQueue does it, but on the ports that the topology gave, and with the doorbell."""
        host, ports = self.endpoint.host, self.endpoint
        self.controller_id = self.address
        self._node_ip = host
        self.zmq_context = zmq.Context()
        self.zmq_context.set(zmq.MAX_SOCKETS, min(65536, self.zmq_context.get(zmq.SOCKET_LIMIT)))
        self.handshake_socket = create_socket(self.zmq_context, zmq.ROUTER, host)
        self.handshake_socket.bind(tcp_address(host, ports.handshake))
        self.request_handle_socket = create_socket(self.zmq_context, zmq.ROUTER, host)
        self.request_handle_socket.bind(tcp_address(host, ports.request))
        self.bell = create_socket(self.zmq_context, zmq.PUB, host)
        self.bell.bind(tcp_address(host, ports.doorbell))
        bound = {"handshake_socket": ports.handshake, "request_handle_socket": ports.request}
        self.zmq_server_info = ServerInfo(Role.CONTROLLER, self.address, host, bound)

    def _handle_request(self, request_msg: Any, monitor: Any) -> Any:
        """Answer one request. TransferQueue's own are refused: they would bypass uids, bounds and the doorbell."""
        try:
            body = dict(request_msg.body)
            operation = body.pop("operation", None)
            if request_msg.receiver_id != self.address:
                raise WrongRun(f"this is {self.address!r}, but the message is for {request_msg.receiver_id!r}")
            if request_msg.sender_id in self._banished:
                raise banished(request_msg.sender_id)
            if operation not in OPERATIONS:
                raise Refused(f"{request_msg.request_type} is not served; use meshy.queue.client")
            if operation in SIGNED:
                body["sender"] = request_msg.sender_id
            with self.lock:
                answer = getattr(self, operation)(**body)
        except QueueError as error:
            answer = {"error": [type(error).__name__, str(error)]}
        return self._make_response(request_msg, MessageType.GET_META_RESPONSE, answer)

    # Operations -------------------------------------------------------------------------------------------------------

    def hello(self) -> dict[str, Any]:
        return {"contract": self.contract.to_json()}

    def ring(self, name: str) -> dict[str, Any]:
        """Ring the doorbell under a name that only the caller listens to: once heard, its subscriptions stand."""
        self.bell.send(topic(name))
        return {}

    def reserve(self, partition: str, uids: list[str], sender: str) -> dict[str, Any]:
        """Row indexes for new rows, and the serial number under which they may be created."""
        ledger, now = self._ledger(partition), time.monotonic()
        lapsed = ledger.lapsed(now)
        if lapsed:
            self._strike(ledger, lapsed)
        ledger.check_room(uids)
        indexes = self.index_manager.allocate_indexes(partition, count=len(uids))
        ledger.status.global_indexes.update(indexes)
        ledger.status.ensure_samples_capacity(max(indexes) + 1)
        ledger.reserve(indexes, uids, now, sender)
        self._serial += 1
        return {"indexes": indexes, "serial": self._serial}

    def release(self, partition: str, indexes: list[int], uids: list[str]) -> dict[str, Any]:
        """Give reserved rows up after a put that failed."""
        ledger = self._ledger(partition)
        mine = [i for i, uid in zip(indexes, uids, strict=True) if i in ledger.reserved and ledger.uids[i] == uid]
        if mine:
            self._strike(ledger, mine)
        return {}

    def commit(self, partition: str, indexes: list[int], uids: list[str], columns: list[str]) -> dict[str, Any]:
        """Columns of rows are in storage: mark them as ready and ring."""
        ledger = self._ledger(partition)
        ledger.fence(indexes, uids, "write")
        # Rows are described by the contract, so TransferQueue need not keep a shape for each.
        schema = {
            name: {"dtype": ledger.contract.columns[name].dtype, "shape": None, "is_non_tensor": True}
            for name in columns
        }
        if not self.update_production_status(partition, indexes, schema):
            raise QueueError(f"TransferQueue did not record columns {columns} of {len(indexes)} rows of {partition!r}")
        for index in indexes:
            ledger.reserved.pop(index, None)
        ledger.acknowledged(indexes, columns)
        self.bell.send(topic(partition))
        return {}

    def take(
        self, partition: str, consumer: str, at_least: int, at_most: int | None, sender: str, alive: int = 0
    ) -> dict[str, Any]:
        return self._ledger(partition).take(consumer, at_least, at_most, alive, sender)._asdict()

    def give_back(self, partition: str, consumer: str, indexes: list[int], uids: list[str]) -> dict[str, Any]:
        self._ledger(partition).give_back(consumer, indexes, uids)
        self.bell.send(topic(partition))
        return {}

    def mark_clearing_rows(
        self, partition: str, consumer: str, indexes: list[int], uids: list[str], unless: str | None = None
    ) -> dict[str, Any]:
        """Hide rows from everybody; storage drops them next, then `clear` frees their indexes."""
        self._ledger(partition).check_clear(consumer, indexes, uids, unless)
        self.mark_clearing(indexes, [partition] * len(indexes))
        return {}

    def clear(self, partition: str, indexes: list[int], uids: list[str]) -> dict[str, Any]:
        ledger = self._ledger(partition)
        ledger.fence(indexes, uids, "clear")
        self._strike(ledger, indexes)
        return {}

    def look(self, partition: str) -> dict[str, Any]:
        return self._ledger(partition).look()

    def banish(self, sender: str) -> dict[str, Any]:
        """From now on nothing is done for this sender, whatever of it is still on its way, and others get what it had:
        rows that it took and did not acknowledge, and the uids of rows that it was about to write."""
        self._banished.add(sender)
        for name, ledger in self.ledgers.items():
            self._strike(ledger, ledger.reserved_by(sender))
            if ledger.return_from(sender):
                self.bell.send(topic(name))
        return {}

    def table(self) -> dict[str, Any]:
        return {name: ledger.table() for name, ledger in self.ledgers.items()}

    def locked_table(self) -> dict[str, Any]:
        """`table`, for threads other than the request thread."""
        with self.lock:
            return self.table()

    def _ledger(self, partition: str) -> Ledger:
        if partition not in self.ledgers:
            raise UnknownName(f"the queue has no partition {partition!r}")
        return self.ledgers[partition]

    def _strike(self, ledger: Ledger, indexes: Sequence[int]) -> None:
        self.clear_meta(list(indexes), [ledger.contract.name] * len(indexes))
        ledger.forget(indexes)
