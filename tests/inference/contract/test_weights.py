"""New weights by every way, memory, and checksums, on both engines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshy.generation import commands
from meshy.generation.commands import Command
from meshy.generation.shared_tensors import SharedSegment, align
from meshy.generation.update_group import UpdateGroup, join, serve_store
from tests.inference import recorded
from tests.inference.contract.served import ENDLESS, IDS, Served, Stream, spans
from tests.inference.test_parity import logprobs_of, reference

HOST = "127.0.0.1"
SEGMENT = 1 << 20
DEADLINE = 30.0


def tell(served: Served, command: Command) -> tuple[int, Any]:
    status, _, answer = served.call(command.path, command.body, command.method)
    return status, answer


def told(served: Served, command: Command) -> Any:
    """The answer, which must be 200 and say that it succeeded."""
    status, answer = tell(served, command)
    assert status == 200 and answer.get("success", True), (command.path, status, answer)
    return answer


def check_serves(served: Served, folder: Path) -> None:
    """It writes, and scores, as `transformers` does with the model in `folder`."""
    answer = served.greedy(9)
    rows = logprobs_of(reference(folder), [*IDS, *answer["output_ids"]])[len(IDS) - 1 :]
    got = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert got == pytest.approx(rows.max(-1).values.tolist(), abs=1e-4)


def tensors_of(folder: Path) -> list[tuple[str, torch.Tensor]]:
    return sorted(load_file(folder / "model.safetensors").items())


def send_by_memory(served: Served, folder: Path, version: int) -> None:
    segment, offset, views = SharedSegment(SEGMENT), 0, []
    for name, tensor in tensors_of(folder):
        view = segment.view(offset, tensor.shape, tensor.dtype)
        view.copy_(tensor)
        views.append((name, view))
        offset = align(offset + tensor.nbytes)
    half = len(views) // 2
    told(served, commands.update_from_tensor([segment.payload(views[:half], 1)], None))
    told(served, commands.update_from_tensor([segment.payload(views[half:], 1)], version))


@contextmanager
def update_group(served: Served, name: str) -> Iterator[UpdateGroup]:
    """A group of this process and the engine."""
    store = serve_store(HOST, 0, DEADLINE)
    command = commands.join_group(HOST, store.port, first_rank=1, world_size=2, group=name, backend="gloo")
    joining = threading.Thread(target=told, args=(served, command), daemon=True)
    joining.start()
    group = join(store, rank=0, world_size=2, name=name, backend="gloo", timeout=DEADLINE)
    joining.join(DEADLINE)
    try:
        yield group
    finally:
        group.close()
        tell(served, commands.leave_group(name))


def broadcast(
    served: Served, group: UpdateGroup, named: list[tuple[str, torch.Tensor]], version: int | None, packed: bool
) -> None:
    pieces = [tensor.contiguous() for _, tensor in named]
    if packed:
        pieces = [torch.cat([piece.view(-1).view(torch.uint8) for piece in pieces])]
    names, dtypes, shapes = zip(
        *((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in named), strict=True
    )
    sent = [group.broadcast(piece, DEADLINE) for piece in pieces]
    told(served, commands.update_from_broadcast(names, dtypes, shapes, group.name, version, packed=packed))
    for one in sent:
        one.wait()


def send_by_broadcast(served: Served, folder: Path, version: int) -> None:
    """Half of the tensors packed, the other half one by one."""
    named = tensors_of(folder)
    half = len(named) // 2
    with update_group(served, f"contract-{version}") as group:
        broadcast(served, group, named[:half], None, packed=True)
        broadcast(served, group, named[half:], version, packed=False)


def test_from_disk(served: Served):
    before = served.checksums()
    status, _, answer = served.load(served.other, "7")
    assert status == 200
    assert answer == {"success": True, "message": recorded.UPDATED.format(version="7"), "num_paused_requests": 0}
    info = served.ok("/model_info")
    assert info["weight_version"] == "7" and info["model_path"] == str(served.other)
    assert info["tokenizer_path"] == str(served.folder)
    check_serves(served, served.other)
    assert served.checksums().keys() == before.keys() and served.checksums() != before
    assert served.load(served.folder, "0")[0] == 200
    assert served.checksums() == before
    check_serves(served, served.folder)


def test_a_folder_that_is_not_there_changes_nothing(served: Served):
    before = served.checksums()
    status, _, answer = served.load(Path("/nowhere"), "8")
    assert status == 400 and answer["success"] is False
    assert served.version == "0" and served.checksums() == before
    check_serves(served, served.folder)


@pytest.mark.parametrize("send", [send_by_memory, send_by_broadcast])
def test_in_buckets_while_requests_are_retracted(served: Served, send):
    stream = Stream(served, sampling_params=ENDLESS)
    stream.until(2)
    served.pause("retract")
    told(served, commands.BEGIN_UPDATE)
    send(served, served.other, 3)
    told(served, commands.END_UPDATE)
    served.go_on()
    last = stream.last()
    assert [version for version, _, _ in spans(last)] == ["0", "3"]
    assert served.version == "3"
    check_serves(served, served.other)
    live = served.checksums()
    assert served.load(served.other, "4")[0] == 200  # the same weights by the way that is known to be right
    assert served.checksums() == live


def test_buckets_need_their_bracket(served: Served):
    segment = SharedSegment(SEGMENT)
    name, tensor = tensors_of(served.other)[0]
    view = segment.view(0, tensor.shape, tensor.dtype)
    command = commands.update_from_tensor([segment.payload([(name, view)], 4)], 5)
    status, answer = tell(served, command)
    assert status == 400 and answer["success"] is False and "begin_weight_update" in answer["message"]
    status, answer = tell(served, commands.END_UPDATE)
    assert status == 400 and answer["success"] is False and "begin_weight_update" in answer["message"]
    told(served, commands.BEGIN_UPDATE)
    status, answer = tell(served, commands.BEGIN_UPDATE)
    assert status == 400 and answer["success"] is False and "end_weight_update" in answer["message"]
    told(served, commands.END_UPDATE)
    assert served.version == "0"
    check_serves(served, served.folder)


def test_a_version_by_name(served: Served):
    body = {"new_version": "11", "abort_all_requests": False}
    assert served.ok("/update_weight_version", body) == {
        "success": True,
        "message": "Weight version updated to 11",
        "new_version": "11",
    }
    assert served.version == "11"


def test_memory_is_released_and_taken_back(served: Served):
    before = served.checksums()
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        assert served.call(path, {"tags": ["kv_cache", "weights"]}) == (200, "application/json", None)
    assert served.checksums() == before
    check_serves(served, served.folder)


def test_an_unknown_check_is_refused(served: Served):
    assert served.call("/weights_checker", {"action": "guess"})[0] == 400
