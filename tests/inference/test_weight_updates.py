"""Updates by tensors beyond what the contract of both engines says: what is refused, what breaks off, what waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from meshy.generation import commands
from meshy.generation.commands import Command
from meshy.generation.expected import ExpectedChecksums
from meshy.generation.layout import layout_of
from meshy.generation.shared_tensors import SharedSegment, align
from meshy.generation.update_group import UpdateGroup, join, serve_store
from meshy.training.weights.publisher import Publisher
from meshy.training.weights.shm import Shm
from tests.inference.contract.served import Served, Stream
from tests.inference.models import CONTEXT, call, serve
from tests.inference.test_protocol import in_background, until

DEADLINE = 60.0
Named = list[tuple[str, Tensor]]


@pytest.fixture
def url(server, folder) -> Iterator[str]:
    """The shared server, left as it was found."""
    yield server
    call(server, "/end_weight_update", {})
    body = {"model_path": str(folder), "weight_version": "0"}
    assert call(server, "/continue_generation", {})[0] == call(server, "/update_weights_from_disk", body)[0] == 200


@pytest.fixture
def new(model_folders) -> Named:
    """Other weights for the served model."""
    return tensors_of(model_folders["other"])


def tensors_of(folder: Path) -> Named:
    return sorted(load_file(folder / "model.safetensors").items())


def tell(url: str, command: Command) -> tuple[int, Any]:
    status, _, answer = call(url, command.path, command.body, command.method)
    return status, answer


def told(url: str, command: Command) -> None:
    status, answer = tell(url, command)
    assert status == 200, (command.path, answer)


def checksums(url: str) -> dict[str, str]:
    return call(url, "/weights_checker", {"action": "checksum"})[2]["ranks"][0]["checksums"]


def version(url: str) -> str:
    return call(url, "/model_info")[2]["weight_version"]


def by_memory(named: Named, version: int | None = None) -> tuple[Command, SharedSegment]:
    """The segment must live until the command has been carried out."""
    segment = SharedSegment(sum(align(tensor.nbytes) for _, tensor in named))
    views, offset = [], 0
    for name, tensor in named:
        view = segment.view(offset, tensor.shape, tensor.dtype)
        view.copy_(tensor)
        views.append((name, view))
        offset = align(offset + tensor.nbytes)
    return commands.update_from_tensor([segment.payload(views, receivers=1)], version), segment


def sent(url: str, named: Named, version: int | None = None) -> tuple[int, Any]:
    command, _segment = by_memory(named, version)
    return tell(url, command)


def expect(url: str, folder: Path, named: Named) -> list[str]:
    """Where the live tensors are not these."""
    config = json.loads((folder / "config.json").read_text())
    expected = ExpectedChecksums(config, layout_of(call(url, "/server_info")[2], config, torch.float32))
    for name, tensor in named:
        expected.add(name, tensor)
    return expected.compare(call(url, "/weights_checker", {"action": "checksum"})[2]["ranks"])


def by_broadcast(named: Named, group: str, version: int | None = None, *, packed: bool = True) -> Command:
    names, dtypes, shapes = zip(
        *((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in named), strict=True
    )
    return commands.update_from_broadcast(names, dtypes, shapes, group, version, packed=packed)


@contextmanager
def joined(url: str, name: str) -> Iterator[UpdateGroup]:
    """A group of this process and the server."""
    store = serve_store("127.0.0.1", 0, DEADLINE)
    command = commands.join_group("127.0.0.1", store.port, first_rank=1, world_size=2, group=name, backend="gloo")
    answer: Future = in_background(tell, url, command)
    group = join(store, rank=0, world_size=2, name=name, backend="gloo", timeout=DEADLINE)
    assert answer.result(DEADLINE)[0] == 200
    try:
        yield group
    finally:
        group.close()
        tell(url, commands.leave_group(name))


def test_each_tensor_can_come_by_a_broadcast_of_its_own(url, folder, new):
    told(url, commands.BEGIN_UPDATE)
    with joined(url, "one-by-one") as group:
        answer = in_background(tell, url, by_broadcast(new, group.name, 3, packed=False))
        for one in [group.broadcast(tensor, DEADLINE) for _, tensor in new]:
            one.wait()
        assert answer.result(DEADLINE)[0] == 200
    told(url, commands.END_UPDATE)
    assert expect(url, folder, new) == [] and version(url) == "3"


def test_tensors_are_received_into_the_live_ones_while_nobody_uses_them(url, folder, new):
    """What was sent is live before the last tensor has come; generation and other loads wait, other work does not."""
    told(url, commands.BEGIN_UPDATE)
    before = checksums(url)
    with joined(url, "slowly") as group:
        answer = in_background(tell, url, by_broadcast(new, group.name, 3, packed=False))
        group.broadcast(new[0][1], DEADLINE).wait()
        until(lambda: checksums(url) != before, "the first tensor to be live")
        short = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
        late = in_background(call, url, "/generate", short)
        other = in_background(tell, url, commands.update_from_disk(folder, 4))
        status, _, refused = call(url, "/release_memory_occupation", {"tags": ["weights"]})
        assert status == 400 and "while weights are being received" in json.dumps(refused)
        until(lambda: held(url) >= 1, "a request to wait")
        assert not (answer.done() or late.done() or other.done()) and version(url) == "0"
        for one in [group.broadcast(tensor, DEADLINE) for _, tensor in new[1:]]:
            one.wait()
        assert answer.result(DEADLINE)[0] == 200 and other.result(DEADLINE)[0] == 200
    assert late.result(DEADLINE)[2]["meta_info"]["weight_versions"][0]["version"] in ("3", "4")
    told(url, commands.END_UPDATE)


def test_what_the_model_has_not_is_refused_and_changes_nothing(url, folder, new):
    before = checksums(url)
    told(url, commands.BEGIN_UPDATE)
    good, (name, tensor) = new[:3], new[3]
    for bad, message in [
        (("model.layers.9.weight", tensor), "the model has no tensor 'model.layers.9.weight'"),
        ((name, tensor[:-1]), f"{name} has shape"),
        ((name, tensor.long()), f"{name} is of torch.int64, in the model of torch.float32"),
    ]:
        status, answer = sent(url, [*good, bad], 9)
        assert status == 400 and answer["success"] is False and message in answer["message"]
        pieces = [tensor.contiguous() for _, tensor in [*good, bad]]
        flat = torch.cat([piece.view(-1).view(torch.uint8) for piece in pieces])
        for packed, sends in ((True, [flat]), (False, pieces)):
            with joined(url, f"bad-{packed}") as group:
                asked = in_background(tell, url, by_broadcast([*good, bad], group.name, 9, packed=packed))
                for one in [group.broadcast(piece, DEADLINE) for piece in sends]:
                    one.wait()  # it takes part, so that others are not held up
                status, answer = asked.result(DEADLINE)
            assert status == 400 and message in answer["message"]
    assert checksums(url) == before and version(url) == "0"
    # All tensors of the refused buckets are missing now, except one that does not exist.
    status, answer = sent(url, [(name, tensor)], 9)
    assert status == 400 and "the weights are not version 9" in answer["message"] and version(url) == "0"
    told(url, commands.END_UPDATE)
    told(url, commands.BEGIN_UPDATE)
    assert sent(url, new, 9)[0] == 200 and version(url) == "9"
    assert expect(url, folder, new) == []


BROADCASTER = """
import sys, torch
from meshy.generation.update_group import join, serve_store
store = serve_store("127.0.0.1", 0, 60)
print(store.port, flush=True)
group = join(store, rank=0, world_size=2, name="killed", backend="gloo", timeout=60)
print("joined", flush=True)
input()
"""


@pytest.mark.e2e
@pytest.mark.parametrize("packed", [True, False])
def test_a_broadcaster_that_is_killed_leaves_a_server_that_owns_to_no_new_version(url, folder, new, packed):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    trainer = subprocess.Popen(
        [sys.executable, "-c", BROADCASTER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert trainer.stdin is not None and trainer.stdout is not None
    port = int(trainer.stdout.readline())
    told(url, commands.join_group("127.0.0.1", port, first_rank=1, world_size=2, group="killed", backend="gloo"))
    assert trainer.stdout.readline() == "joined\n"
    told(url, commands.pause("retract"))
    told(url, commands.BEGIN_UPDATE)
    half = len(new) // 2
    assert sent(url, new[:half])[0] == 200
    asked = in_background(tell, url, by_broadcast(new[half:], "killed", 5, packed=packed))
    assert not asked.done() and call(url, "/v1/loads")[0] == 200  # its other work is not held up
    trainer.kill()
    status, answer = asked.result(DEADLINE)
    assert status == 400 and answer["message"].startswith("Failed to receive weights: The broadcast of")
    trainer.wait(10)
    trainer.stdin.close()
    trainer.stdout.close()
    status, answer = sent(url, new[:half], 5)
    assert status == 400 and f"{len(new) - half} others failed" in answer["message"]
    assert version(url) == "0"
    with joined(url, "next") as group:
        asked = in_background(tell, url, by_broadcast(new[half:], group.name, 5))
        group.broadcast(torch.cat([t.reshape(-1).view(torch.uint8) for _, t in new[half:]]), DEADLINE).wait()
        assert asked.result(DEADLINE)[0] == 200
    told(url, commands.END_UPDATE)
    assert version(url) == "5" and expect(url, folder, new) == []
    assert tell(url, commands.leave_group("killed"))[0] == 400  # it was left when it broke


def test_without_a_pause_what_runs_ends_first_and_what_comes_waits(url, folder, new):
    engine = Served("embedded", url, folder, folder, CONTEXT)
    long = {"temperature": 0, "max_new_tokens": CONTEXT - 12, "ignore_eos": True}
    first = Stream(engine, sampling_params=long)
    first.next()
    begun = in_background(tell, url, commands.BEGIN_UPDATE)
    short = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    assert [span["version"] for span in first.last()["meta_info"]["weight_versions"]] == ["0"]
    assert begun.result(DEADLINE)[0] == 200
    for _ in range(5):  # until one is seen to wait: on a busy machine the response may end before the update comes
        second = Stream(engine, sampling_params=long)
        second.next()
        before = version(url)
        command, _segment = by_memory(new, int(before) + 6)
        loaded = in_background(tell, url, command)
        until(lambda loaded=loaded: loaded.done() or held(url), "the update to wait")
        if not loaded.done():
            break
        assert second.last()["meta_info"]["weight_versions"][-1]["version"] == before
    else:
        pytest.fail("no update was seen to wait")
    late = in_background(call, url, "/generate", short)
    versions = [span["version"] for span in second.last()["meta_info"]["weight_versions"]]
    assert versions == [before] and loaded.result(DEADLINE)[0] == 200
    after = str(int(before) + 6)
    assert late.result(DEADLINE)[2]["meta_info"]["weight_versions"] == [{"version": after, "start": 0, "end": 2}]


@pytest.mark.parametrize(("in_flight", "retractions"), [("retract", 1), ("keep", 0)])
def test_a_publish_retracts_what_is_in_flight_or_keeps_it(url, folder, new, in_flight, retractions):
    publisher = Publisher([url], in_flight=in_flight, deadline=DEADLINE)
    publisher.carrier = Shm({url: 1}, 1 << 20)
    try:
        publisher.start(DEADLINE)
        long = {"temperature": 0, "max_new_tokens": CONTEXT - 12, "ignore_eos": True}
        for number in range(1, 6):  # on a busy machine the response may end before the publish begins
            stream = Stream(Served("embedded", url, folder, folder, CONTEXT), sampling_params=long)
            stream.next()
            assert publisher.stream(number, [url], new, torch.float32).served == [url]
            told = stream.last()["meta_info"]
            versions = [span["version"] for span in told["weight_versions"]]
            if len(versions) > 1:
                break
    finally:
        publisher.close()
    assert versions == [str(number - 1), str(number)]
    assert told["num_retractions"] == retractions


def held(url: str) -> int:
    """Requests that wait for a pause or an update to end; one is sent to see."""
    threading.Thread(
        target=call,
        args=(url, "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}),
        daemon=True,
    ).start()
    return int(call(url, "/v1/loads")[2]["loads"][0]["queues"]["paused"])


@pytest.mark.prove
@pytest.mark.e2e
def test_a_tied_model_in_lower_precision_takes_what_a_trainer_sends(model_folders):
    source = model_folders["qwen3_full_tied"]
    named = [(name, tensor + 0.1) for name, tensor in tensors_of(source)]
    named.append(("lm_head.weight", dict(named)["model.embed_tokens.weight"]))
    with serve(source, "--dtype", "bfloat16", "--context-length", str(CONTEXT)) as (url, _):
        assert expect(url, source, named) != []
        told(url, commands.BEGIN_UPDATE)
        half = len(named) // 2
        for _ in range(2):
            assert sent(url, named[:half])[0] == sent(url, named[half:], 1)[0] == 200
        told(url, commands.END_UPDATE)
        assert expect(url, source, named) == [] and "lm_head.weight" not in checksums(url)
        # Weights that were released come back for it.
        told(url, Command("/release_memory_occupation", {"tags": ["weights"]}))
        told(url, commands.BEGIN_UPDATE)
        assert sent(url, named, 2)[0] == 200 and expect(url, source, named) == [] and version(url) == "2"


def test_rules_of_groups(url, new):
    told(url, commands.BEGIN_UPDATE)
    with joined(url, "mine") as group:
        again = commands.join_group("127.0.0.1", 1, first_rank=1, world_size=2, group="mine", backend="gloo")
        status, answer = tell(url, again)
        assert status == 400 and "has already been created" in answer["message"]
        status, answer = tell(url, by_broadcast(new, "yours", 4))
        assert status == 400 and answer["message"].startswith("Failed to receive weights: Group yours not in ['mine']")
        told(url, commands.leave_group(group.name))
    status, answer = tell(url, commands.leave_group("mine"))
    assert (status, answer["message"]) == (400, "The group to be destroyed does not exist.")
    for backend, message in (("nccl", "NCCL cannot broadcast to cpu"), ("mpi", "not 'mpi'")):
        store = serve_store("127.0.0.1", 0, DEADLINE)
        other = commands.join_group("127.0.0.1", store.port, first_rank=1, world_size=2, group="x", backend=backend)
        status, answer = tell(url, other)
        assert status == 400 and message in answer["message"]


TENSOR, BROADCAST, JOIN = (
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/init_weights_update_group",
)
ONE = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]]}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (TENSOR, {}, "needs the field 'serialized_named_tensors'"),
        (TENSOR, {"serialized_named_tensors": ["a", "b"]}, "must hold one base64 string"),
        (TENSOR, {"serialized_named_tensors": ["a"], "load_format": "direct"}, "does not know load_format 'direct'"),
        (TENSOR, {"serialized_named_tensors": ["?"]}, "The payload cannot be read"),
        (BROADCAST, {"names": []}, "needs the field 'dtypes'"),
        (BROADCAST, {**ONE, "names": ["a", "b"]}, "must be equally many"),
        (BROADCAST, {**ONE, "dtypes": ["decimal"]}, "a has the unknown dtype 'decimal'"),
        (BROADCAST, {**ONE, "shapes": [[-1]]}, "a has the impossible shape"),
        (BROADCAST, {**ONE, "load_format": "zip"}, "does not know load_format 'zip'"),
        (JOIN, {"master_address": "127.0.0.1"}, "needs the field 'master_port'"),
    ],
)
def test_bodies_without_sense_are_refused(url, path, body, message):
    told(url, commands.BEGIN_UPDATE)
    status, _, answer = call(url, path, body)
    assert status == 400 and message in json.dumps(answer)
