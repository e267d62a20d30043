"""TransferQueue's storage unit, fenced: every message says which uid it means each row to hold.

Row indexes are used again once a row is cleared, so metadata that somebody kept may point at another row. A put, read
or clear whose uids are not those held here is refused whole, and nothing is read or written. Rows are created under the
serial number of their reservation, which only grows: a creation that arrives after its reservation lapsed and the index
was given to another row has the lower number and is refused too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import zmq

from meshy.queue.codec import TOKENS, check_token_lengths, from_wire, join
from meshy.queue.endpoints import Endpoints, storage_role
from meshy.queue.errors import MissingColumn, QueueError, StaleRows, WrongRun, banished
from meshy.queue.transferqueue import Message, MessageType, Role, ServerInfo, create_socket, server_modules, tcp_address

_, _simple_storage = server_modules()

logger = logging.getLogger(__name__)


class FencedStorageUnit(_simple_storage.SimpleStorageUnit):
    """Storage unit `unit` of `endpoints`; serves from construction until `shutdown`."""

    def __init__(self, endpoints: Endpoints, unit: int) -> None:
        self.endpoint = endpoints.storage[unit]
        self.address = endpoints.address(storage_role(unit))
        self.held: dict[int, tuple[str, int]] = {}
        """Row index -> (uid, serial) of the rows that are here."""
        self._banished: set[str] = set()
        super().__init__({})  # no bound of its own: the controller refuses rows beyond the partition's capacity

    def _init_zmq_socket(self) -> None:
        """As TransferQueue does it, but on the port that the topology gave."""
        host, port = self.endpoint.host, self.endpoint.request
        self.storage_unit_id = self.address
        self._node_ip = host
        self.zmq_context = zmq.Context()
        self.put_get_socket = create_socket(self.zmq_context, zmq.ROUTER, host)
        self.put_get_socket.bind(tcp_address(host, port))
        self.worker_socket = None
        self.zmq_server_info = ServerInfo(Role.STORAGE, self.address, host, {"put_get_socket": port})

    def _start_process_put_get(self) -> None:
        """One thread that serves the socket itself. TransferQueue's proxy thread in front of its worker would cost two
        more hops a request and half a second at the start."""
        self.worker_thread = threading.Thread(target=self._serve, name="storage", daemon=True)
        self.worker_thread.start()

    def _serve(self) -> None:
        monitor = _simple_storage.IntervalPerfMonitor(caller_name=self.address)
        while not self._shutdown_event.is_set():
            if not self.put_get_socket.poll(1000):  # looks for `shutdown` in between
                continue
            try:
                self._process_one_worker_request(self.put_get_socket, monitor)
            except Exception:
                logger.exception("%s could not serve a request", self.address)

    def _handle_put(self, message: Any) -> Any:
        return self._answer(message, MessageType.PUT_DATA_RESPONSE, self._put)

    def _handle_get(self, message: Any) -> Any:
        return self._answer(message, MessageType.GET_DATA_RESPONSE, self._get)

    def _handle_clear(self, message: Any) -> Any:
        return self._answer(message, MessageType.CLEAR_DATA_RESPONSE, self._clear)

    def _answer(self, message: Any, kind: Any, handle: Any) -> Any:
        try:
            if message.receiver_id != self.address:
                raise WrongRun(f"this is {self.address!r}, but the message is for {message.receiver_id!r}")
            if message.sender_id in self._banished:
                raise banished(message.sender_id)
            body = handle(**message.body)
        except QueueError as error:
            body = {"error": [type(error).__name__, str(error)]}
        return Message.create(request_type=kind, sender_id=self.address, body=body)

    def _put(
        self,
        global_indexes: list[int],
        uids: list[str],
        columns: Mapping[str, Mapping[str, Any]],
        serial: int | None = None,
    ) -> dict[str, Any]:
        """Write columns into rows; with `serial`, create the rows."""
        packed = {name: from_wire(column) for name, column in columns.items()}
        if serial is None:
            self._fence(global_indexes, uids, "write")
            tokens = self.storage_data.field_data.get(TOKENS, {})
            if TOKENS not in packed and all(index in tokens for index in global_indexes):
                check_token_lengths(packed, join([tokens[index] for index in global_indexes]).sizes, uids)
        else:
            self._make_way(global_indexes, uids, serial)
        self.storage_data.put_data({name: column.rows() for name, column in packed.items()}, global_indexes)
        return {}

    def _get(
        self, global_indexes: list[int], uids: list[str], fields: list[str], optional: Sequence[str] = ()
    ) -> dict[str, Any]:
        """optional: fields that some of the rows may lack; the answer says at which positions they are `there`."""
        self._fence(global_indexes, uids, "read")
        columns, there = {}, {}
        for field in fields:
            rows = self.storage_data.field_data.get(field, {})
            lacking = [uid for index, uid in zip(global_indexes, uids, strict=True) if index not in rows]
            if lacking:
                raise MissingColumn(
                    f"column {field!r} has not been written into {len(lacking)} of {len(uids)} rows, such as "
                    f"{lacking[0]!r}; read columns that the consumer waits for, or as optional"
                )
            columns[field] = join([rows[index] for index in global_indexes]).wire()
        for field in optional:
            rows = self.storage_data.field_data.get(field, {})
            there[field] = [position for position, index in enumerate(global_indexes) if index in rows]
            if there[field]:
                columns[field] = join([rows[global_indexes[position]] for position in there[field]]).wire()
        return {"columns": columns, "there": there}

    def _clear(self, global_indexes: list[int], uids: list[str], banish: str | None = None) -> dict[str, Any]:
        """banish: a sender for whom nothing is done from now on, whatever of it is still on its way."""
        if banish is not None:
            self._banished.add(banish)
        self._fence(global_indexes, uids, "clear")
        self._drop(global_indexes)
        return {}

    def _fence(self, indexes: Sequence[int], uids: Sequence[str], what: str) -> None:
        for index, uid in zip(indexes, uids, strict=True):
            held, _ = self.held.get(index, (None, 0))
            if held != uid:
                now = "is empty" if held is None else f"holds {held!r}"
                raise StaleRows(f"{what} of {uid!r} refused by {self.address}: row {index} was cleared and now {now}")

    def _make_way(self, indexes: Sequence[int], uids: Sequence[str], serial: int) -> None:
        """Take the rows over from creations that were never committed; refuse if a later one took them over."""
        for index, uid in zip(indexes, uids, strict=True):
            held, other = self.held.get(index, (None, -1))
            if other > serial:
                raise StaleRows(
                    f"put of {uid!r} refused by {self.address}: it came too late, row {index} holds {held!r}"
                )
        self._drop([index for index in indexes if index in self.held])
        self.held.update((index, (uid, serial)) for index, uid in zip(indexes, uids, strict=True))

    def _drop(self, indexes: Sequence[int]) -> None:
        self.storage_data.clear(list(indexes))
        for index in indexes:
            del self.held[index]
